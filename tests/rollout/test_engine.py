"""One engine without tensor parallelism: weights, samples and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.data.prompts import greedy_requests
from megarl.models import model_spec
from megarl.resharding import ConnectRequest, SyncSpec
from megarl.types import Prompt, SampledTurn, SampleRequest, VersionSpan
from megarl.weights.hf_files import HFDirectory, read_config
from megarl.weights.planner import Holder, Place, plan
from tests.rollout import in_process
from tests.rollout.conftest import NEW_TOKENS, Answers, ask, requests, sequences, start
from tests.rollout.engine_process import EngineProcess, RemoteError
from tests.rollout.models import END, MAX_LEN, USED_VOCAB, VOCAB
from tests.rollout.oracles import assert_close, assert_same, hf_greedy, hf_logits, hf_raw_logprobs
from tests.rollout.syncing import Trainer, sync

pytestmark = [pytest.mark.e2e]

COLUMNS = ("response_ids", "rollout_logprobs")


@pytest.fixture(scope="module")
def engine(process: EngineProcess, fresh: Mapping[str, Answers], models: Mapping[str, Path]) -> EngineProcess:
    """A synced engine whose weights the tests replace; versions count on."""
    start(process, models["qwen2"])
    with pytest.raises(RemoteError, match="RuntimeError: engine 3 has no weights yet"):
        process.apply(in_process.generate, requests(), [6])
    sync(process, models["qwen2"], 1)
    return process


def resync(engine: EngineProcess, model_dir: Path) -> None:
    sync(engine, model_dir, engine.apply(in_process.version) + 1)


def test_turns_are_the_responses_to_the_same_requests_and_come_as_they_end(
    engine: EngineProcess, models: Mapping[str, Path]
) -> None:
    resync(engine, models["qwen2"])
    chunk = ask(engine).chunk
    answers = engine.apply(in_process.sample_turns, requests())
    turns = dict(sorted(turn for batch in answers for turn in batch))
    assert list(turns) == [100, 101, 102, 103, 104, 105]
    for row, turn in enumerate(turns.values()):
        expected = SampledTurn.of(chunk, row)
        assert (turn.token_ids, turn.finished, turn.versions) == (
            expected.token_ids,
            expected.finished,
            expected.versions,
        )
        np.testing.assert_array_equal(turn.logprobs, expected.logprobs)
    lengths = [[len(turn.token_ids) for _, turn in batch] for batch in answers]
    assert len(lengths) == len({length for batch in lengths for length in batch}), "those of a length end together"
    assert engine.apply(in_process.beats), "without an answer, a call returns after a while"


def test_a_sync_refused_before_the_first_write_changes_nothing(
    engine: EngineProcess, models: Mapping[str, Path], fresh: Mapping[str, Answers]
) -> None:
    resync(engine, models["qwen2"])
    version = engine.apply(in_process.version)
    Trainer(engine, models["qwen2_later"]).fail_to_sync(version - 1, reason=f"version {version - 1} is below")
    assert engine.apply(in_process.version) == version
    assert_same(ask(engine), fresh["qwen2"])


def test_after_an_aborted_sync_the_engine_refuses_until_a_complete_one(
    engine: EngineProcess, models: Mapping[str, Path], fresh: Mapping[str, Answers]
) -> None:
    resync(engine, models["qwen2"])
    version = engine.apply(in_process.version)
    trainer = Trainer(engine, models["qwen2_later"])
    trainer.fail_to_sync(version + 1, corrupt=(0, 3), reason="for bucket 3 is corrupt")
    for use in (lambda: ask(engine), lambda: engine.call("logprobs", sequences())):
        with pytest.raises(RemoteError, match="RuntimeError: engine 3 has the weights of two versions"):
            use()
    sync(engine, models["qwen2_later"], version + 1)
    assert_same(ask(engine), fresh["qwen2_later"])


def test_a_plan_for_another_model_is_refused_before_connecting(
    engine: EngineProcess, models: Mapping[str, Path]
) -> None:
    spec = model_spec(read_config(models["llama"]))
    held = HFDirectory(models["llama"]).map(spec.manifest())
    transfers = plan([Holder(rank=0, map=held)], [Holder(rank=1, map=spec.vllm_map(1, 0))], 1 << 20)
    nobody = SyncSpec.of(transfers, name="test", host="localhost", port=1, places=[Place(), Place()])
    with pytest.raises(RemoteError, match=r"(?s)qkv_proj.bias: not in the shard map.*lm_head.weight: not in"):
        engine.call("connect", ConnectRequest(sync=nobody, ranks=[1]))


def test_raw_logprobs_equal_transformers(engine: EngineProcess, models: Mapping[str, Path]) -> None:
    resync(engine, models["qwen2"])
    got = engine.call("logprobs", sequences())
    assert_close(got, hf_raw_logprobs(models["qwen2"], sequences()), 1e-4, "vLLM against transformers")


def test_the_fields_of_a_rollout(engine: EngineProcess, models: Mapping[str, Path]) -> None:
    resync(engine, models["qwen2"])
    version = engine.apply(in_process.version)
    asked = requests(40)
    infos, chunks = engine.apply(in_process.generate, asked, [15, 25])
    assert [len(chunk.sample_ids) for chunk in chunks] == [15, 25]
    assert [info.sample_id for info in infos] == [request.sample_id for request in asked]
    for request, info in zip(asked, infos, strict=True):
        chunk = chunks[info.chunk]
        response = chunk.response_ids[info.row]
        assert chunk.sample_ids[info.row] == request.sample_id
        assert tuple(chunk.prompt_ids[info.row]) == request.prompt.token_ids
        assert (info.prompt_tokens, info.response_tokens) == (len(request.prompt.token_ids), len(response))
        assert len(chunk.rollout_logprobs[info.row]) == len(response)
        assert info.finished == chunk.finished[info.row] == (response[-1] == END)
        assert info.finished or len(response) == NEW_TOKENS
        assert END not in response[:-1]
        span = VersionSpan(start=0, stop=len(response), version=version, engine_id=3)
        assert chunk.versions[info.row] == (span,)
    finished = [info.finished for info in infos]
    assert any(finished)
    assert not all(finished)


def test_samples_do_not_depend_on_the_division_among_engines(engine: EngineProcess, models: Mapping[str, Path]) -> None:
    """Two engines with one queue give the samples of this engine with the work in two parts, bit for bit."""
    resync(engine, models["qwen2"])
    together = engine.apply(in_process.generate, requests(24), [24])[1][0]
    answers = {row: (together.response_ids[row], together.rollout_logprobs[row]) for row in range(24)}
    assert len({tuple(ids) for ids, _ in answers.values()}) > 20, "samples of one prompt differ by their seeds"
    for rows, sizes, at_once in ((range(24), [3] * 8, 2), (range(0, 24, 2), [4] * 3, 3), (range(23, 0, -2), [12], 1)):
        asked = [requests(24)[row] for row in rows]
        chunks = engine.apply(in_process.generate, asked, sizes, at_once)[1]
        ids, logprobs = ([row for chunk in chunks for row in getattr(chunk, name)] for name in COLUMNS)
        for i, row in enumerate(rows):
            np.testing.assert_array_equal(ids[i], answers[row][0])
            np.testing.assert_array_equal(logprobs[i], answers[row][1])


def test_a_failed_step_fails_every_response_in_progress(engine: EngineProcess, models: Mapping[str, Path]) -> None:
    resync(engine, models["qwen2"])
    before = ask(engine)
    left, errors = engine.apply(in_process.give_up, requests(12, first_seed=99), [1] * 12)
    assert left == 0
    assert set(errors) == {"ZeroDivisionError('division by zero')"}
    assert_same(ask(engine), before)


def test_every_64_bit_seed_is_accepted(engine: EngineProcess, models: Mapping[str, Path]) -> None:
    resync(engine, models["qwen2"])
    prompt = requests()[0].prompt
    asked = [SampleRequest(sample_id=str(seed), prompt=prompt, seed=seed) for seed in (0, 2**63 - 1, 2**64 - 1)]
    first, second = (engine.apply(in_process.generate, asked, [3])[1][0] for _ in range(2))
    np.testing.assert_array_equal(first.response_ids.values, second.response_ids.values)


def test_a_greedy_request_equals_transformers_and_does_not_affect_others(
    engine: EngineProcess, models: Mapping[str, Path]
) -> None:
    resync(engine, models["qwen2"])
    sampled = requests(6)
    _, (alone,) = engine.apply(in_process.generate, sampled, [6])
    prompts = [request.prompt for request in sampled[::2]]
    mixed = [r for pair in zip(sampled[::2], greedy_requests(prompts, step=1), strict=True) for r in pair]
    _, (together,) = engine.apply(in_process.generate, mixed, [6])
    for index, prompt in enumerate(prompts):
        expected = hf_greedy(models["qwen2"], prompt.token_ids, NEW_TOKENS)
        assert together.response_ids[2 * index + 1].tolist() == expected
        np.testing.assert_array_equal(together.response_ids[2 * index], alone.response_ids[2 * index])
        np.testing.assert_array_equal(together.rollout_logprobs[2 * index], alone.rollout_logprobs[2 * index])


def test_unused_ids_are_never_sampled(engine: EngineProcess, models: Mapping[str, Path]) -> None:
    resync(engine, models["greedy_padding"])
    chunk = ask(engine).chunk
    assert chunk.response_ids.values.max() < USED_VOCAB
    whole = [[*p, *r] for p, r in zip(chunk.prompt_ids, chunk.response_ids, strict=True)]
    unmasked = torch.cat(hf_logits(models["greedy_padding"], whole)).softmax(-1)
    assert unmasked[:, USED_VOCAB:].sum(-1).mean() > 0.99, "without the mask little else would be sampled"


def test_padding_rows_of_the_output_layer_are_never_sampled(engine: EngineProcess, models: Mapping[str, Path]) -> None:
    resync(engine, models["qwen2"])
    before = ask(engine)
    assert engine.apply(in_process.raise_padding_rows) == [128 - VOCAB]
    assert_same(ask(engine), before)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ((), "prompt 'bad' is empty"),
        ((5,) * (MAX_LEN - NEW_TOKENS + 1), f"prompt 'bad' has {MAX_LEN - NEW_TOKENS + 1} tokens and max_new_tokens"),
        ((5, VOCAB), f"prompt 'bad' has ids from 5 to {VOCAB}"),
        ((-1, 5), "prompt 'bad' has ids from -1"),
    ],
)
def test_invalid_prompts_are_named_and_leave_no_requests(
    engine: EngineProcess, prompt: tuple[int, ...], message: str
) -> None:
    bad = SampleRequest(sample_id="b", prompt=Prompt(prompt_id="bad", token_ids=prompt), seed=0)
    with pytest.raises(RemoteError, match=f"ValueError: {message}"):
        engine.apply(in_process.generate, [*requests(2), bad], [2, 1])
    assert len(engine.apply(in_process.generate, requests(2), [2])[0]) == 2


def test_sequences_that_are_too_long_are_refused(engine: EngineProcess) -> None:
    with pytest.raises(RemoteError, match=f"ValueError: sequence 1 has {MAX_LEN + 1} tokens"):
        engine.call("logprobs", [[1, 2], [1] * (MAX_LEN + 1)])
