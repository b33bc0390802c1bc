"""Every layout against Hugging Face: log-probabilities, values and scores of packed samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.types import Layout, RolloutChunk
from tests.megatron.samples import conversations, random_chunks, with_given
from tests.megatron.tiny import load_role, random_head, save_model
from tests.pool import RankPool

TEMPERATURE = 0.8


IN_USE = 90
"""Token ids in use, in the test of those that are not."""


def infer(
    rank: int, directory: Path, layout: Layout, budget: int, given: list[RolloutChunk] | None = None
) -> dict[str, object]:
    from megarl.data.schedule import inference_schedule
    from megarl.megatron.parallel import GroupCache

    rollouts, infos = random_chunks()
    rollouts = given or rollouts
    infos = with_given(infos, rollouts)
    schedule = inference_schedule(infos, layout, budget).ranks[layout.coords(rank).dp]
    cache = GroupCache()
    actor = load_role(directory, "actor", layout, rank, cache, trainable=False, head=None)
    critic = load_role(directory, "critic", layout, rank, cache, trainable=False, head=random_head(directory))
    reward = load_role(directory, "reward", layout, rank, cache, trainable=False, head=random_head(directory))
    return {
        "logprobs": actor.logprobs(schedule, rollouts, temperature=TEMPERATURE),
        "values": critic.values(schedule, rollouts),
        "scores": reward.scores(schedule, rollouts),
        "token_scores": reward.token_scores(schedule, rollouts),
    }


def expectations(
    directory: Path, given: list[RolloutChunk] | None = None
) -> dict[str, dict[tuple[int, int], torch.Tensor]]:
    """One sequence at a time through Hugging Face's model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    rollouts = given or random_chunks()[0]
    columns = ("logprobs", "values", "scores", "token_scores")
    found: dict[str, dict[tuple[int, int], torch.Tensor]] = {column: {} for column in columns}
    for index, chunk in enumerate(rollouts):
        for row in range(len(chunk.sample_ids)):
            prompt, response = (torch.from_numpy(ids[row]).long() for ids in (chunk.prompt_ids, chunk.response_ids))
            with torch.no_grad():
                out = model(torch.cat([prompt, response])[None], output_hidden_states=True)
            log_p = torch.log_softmax(out.logits[0, len(prompt) - 1 : -1] / TEMPERATURE, -1)
            values = (out.hidden_states[-1][0] @ random_head(directory).T)[:, 0]
            mask = torch.ones(len(response)) if chunk.loss_mask is None else torch.from_numpy(chunk.loss_mask[row])
            sampled = mask.bool()
            states = values[len(prompt) - 1 :]  # before the first token of the response and after each
            sides = states[:-1][sampled], states[1:][sampled]
            found["logprobs"][index, row] = log_p.gather(-1, response[:, None])[:, 0][sampled]
            found["values"][index, row] = sides[0]
            found["scores"][index, row] = values[-1]
            found["token_scores"][index, row] = states if sampled.all() else torch.cat(sides)
    return found


def worst_differences(
    results: list[dict[str, object]], expected: dict[str, dict[tuple[int, int], torch.Tensor]]
) -> dict[str, float]:
    """The largest difference of each column, from what the reporting ranks returned."""
    worst = {}
    for what, rows in expected.items():
        merged = {chunk: column for result in results for chunk, column in (result[what] or {}).items()}
        assert sorted(merged) == list(range(4))
        worst[what] = max(abs(torch.as_tensor(merged[c][r]) - want).max().item() for (c, r), want in rows.items())
    return worst


LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(pp=2),
    Layout(dp=2),
    Layout(tp=2, pp=2),
    Layout(tp=4),
    Layout(pp=4),
    Layout(tp=2, dp=2, sequence_parallel=True),
    Layout(pp=2, vpp=2),
    Layout(tp=2, pp=2, vpp=2, sequence_parallel=True),
]


def layout_id(layout: Layout) -> str:
    sp = "-sp" if layout.sequence_parallel else ""
    return f"tp{layout.tp}-pp{layout.pp}-dp{layout.dp}-vpp{layout.vpp}{sp}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its embeddings are tied; test_families has the others."""
    return save_model(tmp_path_factory.mktemp("qwen2"), "qwen2", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, dict[tuple[int, int], torch.Tensor]]:
    return expectations(model)


@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_id)
def test_outputs_equal_hugging_face(
    pool: RankPool, model: Path, expected: dict[str, dict[tuple[int, int], torch.Tensor]], layout: Layout
) -> None:
    results = pool.run(infer, model, layout, 40, world_size=layout.world_size)
    reports = [r for r in range(layout.world_size) if layout.coords(r).tp == 0 and layout.coords(r).pp == layout.pp - 1]
    for rank, result in enumerate(results):
        assert (result["logprobs"] is not None) == (rank in reports)
    for what, worst in worst_differences(results, expected).items():
        largest = max(want.abs().max().item() for want in expected[what].values())
        # Over TP, float32 sums are taken in another order: the error grows with the numbers that are summed.
        bar = 1e-5 if layout.tp == 1 else 1e-5 * max(1.0, largest)
        assert worst <= bar, f"{what} differ from Hugging Face by {worst:.2e}, more than {bar:.2e}"


@pytest.mark.dist
def test_given_tokens_are_read_and_have_no_outputs(pool: RankPool, model: Path) -> None:
    layout, talks = Layout(tp=2, dp=2, sequence_parallel=True), conversations(random_chunks()[0])
    results = pool.run(infer, model, layout, 60, talks, world_size=layout.world_size)
    expected = expectations(model, talks)
    for what, worst in worst_differences(results, expected).items():
        largest = max(want.abs().max().item() for want in expected[what].values())
        assert worst <= 1e-5 * max(1.0, largest), f"{what} differ from Hugging Face by {worst:.2e}"


def _infer_in_use(rank: int, directory: Path, layout: Layout) -> dict[int, object] | None:
    from megarl.data.schedule import inference_schedule
    from megarl.megatron.parallel import GroupCache

    rollouts, infos = random_chunks(vocab=IN_USE)
    actor = load_role(directory, "actor", layout, rank, GroupCache(), trainable=False, head=None, vocab_size=IN_USE)
    own = inference_schedule(infos, layout, 40).ranks[actor.coords.dp]
    return actor.logprobs(own, rollouts, temperature=1.0)


@pytest.mark.dist
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=4)], ids=layout_id)
def test_unused_ids_have_no_probability(pool: RankPool, tmp_path: Path, layout: Layout) -> None:
    from transformers import AutoModelForCausalLM

    directory = save_model(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    rollouts, _ = random_chunks(vocab=IN_USE)
    (found,) = [r for r in pool.run(_infer_in_use, directory, layout, world_size=layout.world_size) if r is not None]
    for index, chunk in enumerate(rollouts):
        for row in range(len(chunk.sample_ids)):
            prompt, response = (torch.from_numpy(ids[row]).long() for ids in (chunk.prompt_ids, chunk.response_ids))
            with torch.no_grad():
                logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1, :IN_USE]
            want = torch.log_softmax(logits, -1).gather(-1, response[:, None])[:, 0]
            torch.testing.assert_close(torch.as_tensor(found[index][row].copy()), want, rtol=0, atol=3e-5)


def _rope_tables(rank: int, directory: Path) -> tuple[int, int]:
    """How many tables of rope exist after passes over many lengths, and how many lengths those were."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from megarl.data.schedule import inference_schedule
    from megarl.megatron.parallel import GroupCache

    rollouts, infos = random_chunks()
    actor = load_role(directory, "actor", Layout(), rank, GroupCache(), trainable=False, head=None)
    before = RotaryEmbedding.forward.cache_info().currsize
    lengths = [info.prompt_tokens + info.response_tokens for info in infos]
    schedules = [inference_schedule(infos, Layout(), budget).ranks[0] for budget in (max(lengths), 2 * max(lengths))]
    longest: set[int] = set()
    for schedule in schedules:
        actor.logprobs(schedule, rollouts, temperature=TEMPERATURE)
        longest |= {max(row.prompt_tokens + row.response_tokens for row in pack) for pack in schedule.packs}
    return RotaryEmbedding.forward.cache_info().currsize - before, len(longest)


@pytest.mark.dist
def test_rope_tables_of_many_lengths_are_few(pool: RankPool, tmp_path: Path) -> None:
    """Megatron caches one for each of the last 32 lengths that it is asked for: powers of two."""
    ((tables, lengths),) = pool.run(_rope_tables, save_model(tmp_path / "model"), world_size=1)
    assert 0 < tables < lengths / 2
