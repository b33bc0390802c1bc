"""Every family and layout against Hugging Face: log-probabilities, values and scores of packed samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from megarl.types import Layout, RolloutChunk
from tests.megatron.compare import logprobs_by_chunk
from tests.megatron.families import FAMILIES, MIXTURES, MODELS
from tests.megatron.samples import conversations, random_chunks, with_given
from tests.megatron.tiny import load_role, random_head, save_model
from tests.pool import RankPool

TEMPERATURE = 0.8
IN_USE = 90
"""Token ids in use, in the test of those that are not."""

Expected = dict[str, dict[tuple[int, int], torch.Tensor]]


def infer(
    rank: int,
    directory: Path,
    layout: Layout,
    budget: int,
    given: list[RolloutChunk] | None = None,
    dtype: torch.dtype = torch.float32,
    in_use: int = 100,
) -> dict[str, object]:
    from megarl.data.schedule import inference_schedule
    from megarl.megatron.parallel import GroupCache

    rollouts, infos = random_chunks(vocab=in_use)
    rollouts = given or rollouts
    infos = with_given(infos, rollouts)
    schedule = inference_schedule(infos, layout, budget).ranks[layout.coords(rank).dp]
    make = {"layout": layout, "rank": rank, "cache": GroupCache(), "trainable": False, "dtype": dtype}
    actor = load_role(directory, "actor", head=None, vocab_size=None if in_use == 100 else in_use, **make)
    critic = load_role(directory, "critic", head=random_head(directory), **make)
    reward = load_role(directory, "reward", head=random_head(directory), **make)
    return {
        "logprobs": logprobs_by_chunk(actor, schedule, rollouts, TEMPERATURE),
        "values": critic.values(schedule, rollouts),
        "scores": reward.scores(schedule, rollouts),
        "token_scores": reward.token_scores(schedule, rollouts),
    }


def expectations(
    directory: Path,
    given: list[RolloutChunk] | None = None,
    dtype: torch.dtype = torch.float32,
    in_use: int | None = None,
) -> Expected:
    """One sequence at a time through Hugging Face's model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    columns = ("logprobs", "values", "scores", "token_scores")
    found: Expected = {column: {} for column in columns}
    for index, chunk in enumerate(given or random_chunks()[0]):
        for row in range(len(chunk.sample_ids)):
            prompt, response = (torch.from_numpy(ids[row]).long() for ids in (chunk.prompt_ids, chunk.response_ids))
            with torch.no_grad():
                out = model(torch.cat([prompt, response])[None], output_hidden_states=True)
            log_p = torch.log_softmax(out.logits[0, len(prompt) - 1 : -1, :in_use].float() / TEMPERATURE, -1)
            values = (out.hidden_states[-1][0].float() @ random_head(directory).T)[:, 0]
            mask = torch.ones(len(response)) if chunk.loss_mask is None else torch.from_numpy(chunk.loss_mask[row])
            sampled = mask.bool()
            states = values[len(prompt) - 1 :]  # before the first token of the response and after each
            sides = states[:-1][sampled], states[1:][sampled]
            found["logprobs"][index, row] = log_p.gather(-1, response[:, None])[:, 0][sampled]
            found["values"][index, row] = sides[0]
            found["scores"][index, row] = values[-1]
            found["token_scores"][index, row] = torch.cat(sides)
    return found


def differences(results: list[dict[str, object]], expected: Expected) -> dict[str, torch.Tensor]:
    """The difference of each number of each column, from what the reporting ranks returned."""
    found = {}
    for what, rows in expected.items():
        merged = {chunk: column for result in results for chunk, column in (result[what] or {}).items()}
        assert sorted(merged) == list(range(4))
        found[what] = torch.cat(
            [(torch.as_tensor(merged[c][r]) - want).abs().flatten() for (c, r), want in rows.items()]
        )
    return found


def layout_id(layout: Layout) -> str:
    sp = "-sp" if layout.sequence_parallel else ""
    ep = f"-ep{layout.ep}" if layout.ep > 1 else ""
    return f"tp{layout.tp}-pp{layout.pp}-dp{layout.dp}-vpp{layout.vpp}{ep}{sp}"


def case_id(value: object) -> str:
    return layout_id(value) if isinstance(value, Layout) else str(value)


SP2, INTERLEAVED = Layout(tp=2, sequence_parallel=True), Layout(pp=2, vpp=2)
CASES = [
    *(("tied", layout) for layout in (Layout(pp=4), replace(SP2, dp=2), replace(SP2, pp=2, vpp=2))),
    ("tied", Layout(tp=2, pp=2)),
    ("gemma3", replace(SP2, pp=2)),
    *((name, Layout()) for name in ("tied", *FAMILIES)),
    *((name, INTERLEAVED) for name in ("tied", "qwen3_5", "gemma3", "gpt2")),
    *((name, replace(SP2, tp=MODELS[name].tp[0])) for name in ("tied", *FAMILIES)),
    *((name, layout) for name in MIXTURES for layout in (Layout(), Layout(dp=2, ep=2))),
    *((name, replace(SP2, tp=MODELS[name].tp[0], pp=2)) for name in MIXTURES),
]
MORE = [(name, INTERLEAVED) for name in FAMILIES if (name, INTERLEAVED) not in CASES]
"""Of `make matrix`."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Expected]]:
    @cache
    def case(name: str) -> tuple[Path, Expected]:
        directory = MODELS[name].save(tmp_path_factory.mktemp(name))
        return directory, expectations(directory)

    return case


def _check(results: list[dict[str, object]], expected: Expected, layout: Layout) -> None:
    for what, found in differences(results, expected).items():
        largest = max(want.abs().max().item() for want in expected[what].values())
        # Over TP, float32 sums are taken in another order: the error grows with the numbers that are summed.
        bar = 1e-5 if layout.tp == 1 else 1e-5 * max(1.0, largest)
        assert found.max() <= bar, f"{what} differ from Hugging Face by {found.max():.2e}, more than {bar:.2e}"


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "layout"), [*CASES, *(pytest.param(*case, marks=pytest.mark.matrix) for case in MORE)], ids=case_id
)
def test_outputs_equal_hugging_face(
    pool: RankPool, made: Callable[[str], tuple[Path, Expected]], name: str, layout: Layout
) -> None:
    directory, expected = made(name)
    results = pool.run(infer, directory, layout, 40, world_size=layout.world_size)
    reports = [r for r in range(layout.world_size) if layout.coords(r).tp == 0 and layout.coords(r).pp == layout.pp - 1]
    for rank, result in enumerate(results):
        assert (result["logprobs"] is not None) == (rank in reports)
    _check(results, expected, layout)


@pytest.mark.dist
def test_given_tokens_are_read_and_have_no_outputs(
    pool: RankPool, made: Callable[[str], tuple[Path, Expected]]
) -> None:
    layout, talks = replace(SP2, dp=2), conversations(random_chunks()[0])
    directory, _ = made("tied")
    results = pool.run(infer, directory, layout, 60, talks, world_size=layout.world_size)
    _check(results, expectations(directory, talks), layout)


def check_half_precision(pool: RankPool, directory: Path, layout: Layout) -> None:
    """Each program rounds in its own way; ours may not be further from the truth than theirs, in the mean."""
    results = pool.run(infer, directory, layout, 60, None, torch.bfloat16, world_size=layout.world_size)
    truth, theirs = (expectations(directory, dtype=dtype)["logprobs"] for dtype in (torch.float32, torch.bfloat16))
    usual = torch.cat([(theirs[row] - want).abs() for row, want in truth.items()])
    assert differences(results, {"logprobs": truth})["logprobs"].mean() <= 1.5 * usual.mean()


@pytest.mark.dist
@pytest.mark.parametrize(("tied", "layout"), [(False, Layout(tp=2, pp=2)), (True, Layout(pp=4))], ids=case_id)
def test_bfloat16_errors_are_no_larger_than_hugging_faces(
    pool: RankPool, tmp_path: Path, tied: bool, layout: Layout
) -> None:
    check_half_precision(pool, save_model(tmp_path, dtype="bfloat16", tie_word_embeddings=tied), layout)


@pytest.mark.dist
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=4)], ids=case_id)
def test_unused_ids_have_no_probability(pool: RankPool, tmp_path: Path, layout: Layout) -> None:
    directory = save_model(tmp_path / "model")
    results = pool.run(infer, directory, layout, 40, None, torch.float32, IN_USE, world_size=layout.world_size)
    _check(results, expectations(directory, random_chunks(vocab=IN_USE)[0], in_use=IN_USE), layout)


def _rope_tables(rank: int, directory: Path) -> tuple[int, int]:
    """How many tables of rope exist after passes over many lengths, and how many lengths those were."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from megarl.data.schedule import inference_schedule

    rollouts, infos = random_chunks()
    actor = load_role(directory, "actor", Layout(), rank)
    before = RotaryEmbedding.forward.cache_info().currsize
    lengths = [info.prompt_tokens + info.response_tokens for info in infos]
    schedules = [inference_schedule(infos, Layout(), budget).ranks[0] for budget in (max(lengths), 2 * max(lengths))]
    longest: set[int] = set()
    for schedule in schedules:
        actor.logprobs(schedule, rollouts, TEMPERATURE)
        longest |= {max(row.prompt_tokens + row.response_tokens for row in pack) for pack in schedule.packs}
    return RotaryEmbedding.forward.cache_info().currsize - before, len(longest)


@pytest.mark.dist
def test_rope_tables_of_many_lengths_are_few(pool: RankPool, tmp_path: Path) -> None:
    """Megatron caches one for each of the last 32 lengths that it is asked for: powers of two."""
    ((tables, lengths),) = pool.run(_rope_tables, save_model(tmp_path / "model"), world_size=1)
    assert 0 < tables < lengths / 2
