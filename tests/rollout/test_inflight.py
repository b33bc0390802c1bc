"""Weight updates while responses are in progress: every token has one version, and the response continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from megarl.data.prompts import greedy_requests, random_prompts, sample_requests
from megarl.types import RolloutChunk, SampleRequest
from tests.rollout import in_process
from tests.rollout.conftest import NEW_TOKENS, Answers, ask, requests, start
from tests.rollout.engine_process import EngineProcess, RemoteError
from tests.rollout.models import END, MAX_LEN, USED_VOCAB
from tests.rollout.oracles import assert_same, version_logprobs
from tests.rollout.syncing import Trainer, sync

pytestmark = [pytest.mark.e2e]

VERSIONS = ("qwen2", "qwen2_later", "greedy_padding")
"""The models of versions 0, 1 and 2, unlike each other."""
BEFORE, BETWEEN = 3, 4
"""Steps before the first update, and between the two."""

PROMPTS = random_prompts(count=12, min_tokens=20, max_tokens=MAX_LEN - 2 * NEW_TOKENS, vocab_size=USED_VOCAB, seed=3)
GREEDY = greedy_requests(PROMPTS, step=1)
FIRST = [*sample_requests(PROMPTS, 3, seed=5, step=1), *GREEDY]
SECOND = [*sample_requests(PROMPTS, 1, seed=5, step=2), *GREEDY[:4]]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine, and its responses when it got versions 1 and 2.

    Args:
        first: responses to FIRST, which began before both updates.
        second: responses to SECOND, which began between them.
    """

    process: EngineProcess
    keep: bool
    first: Sequence[RolloutChunk]
    second: Sequence[RolloutChunk]

    def begin(self, model_dir: Path, asked: Sequence[SampleRequest], steps: int = BEFORE) -> None:
        """Takes steps with these weights."""
        self.update(model_dir)
        self.process.apply(in_process.begin, asked)
        self.process.apply(in_process.take_steps, steps)

    def update(self, model_dir: Path) -> None:
        sync(self.process, model_dir, self.process.apply(in_process.version) + 1)

    def end(self) -> list[RolloutChunk]:
        return self.process.apply(in_process.end)


def generate(process: EngineProcess, asked: Sequence[SampleRequest]) -> list[RolloutChunk]:
    """A chunk for each response."""
    return process.apply(in_process.generate, asked, [1] * len(asked))[1]


@pytest.fixture(scope="module")
def untouched(process: EngineProcess, models: Mapping[str, Path]) -> list[RolloutChunk]:
    """The answers to FIRST of an engine that keeps version 0 and refuses another one meanwhile."""
    start(process, models[VERSIONS[0]], weights="files", mode="bounded")
    process.apply(in_process.begin, FIRST)
    process.apply(in_process.take_steps, BEFORE)
    with pytest.raises(RemoteError, match=r"RuntimeError: engine 3 cannot sync with \d+ responses in progress"):
        process.call("receive_weights", 1)
    return process.apply(in_process.end)


@pytest.fixture(scope="module")
def relay(
    process: EngineProcess, models: Mapping[str, Path], untouched: list[RolloutChunk]
) -> list[tuple[list[int], list[float]]]:
    """Greedy responses of three engines, one for each version, which get the tokens so far as their prompt."""
    rows = [
        (chunk.response_ids[0][:BEFORE].tolist(), chunk.rollout_logprobs[0][:BEFORE].tolist())
        for chunk in untouched[-len(GREEDY) :]
    ]
    for name, end in ((VERSIONS[1], BEFORE + BETWEEN), (VERSIONS[2], NEW_TOKENS)):
        start(process, models[name], weights="files")
        asked = [
            replace(request, prompt=replace(request.prompt, token_ids=(*request.prompt.token_ids, *ids)))
            for request, (ids, _) in zip(GREEDY, rows, strict=True)
        ]
        for (ids, logprobs), chunk in zip(rows, generate(process, asked), strict=True):
            count = 0 if ids[-1] == END else end - len(ids)
            ids += chunk.response_ids[0][:count].tolist()
            logprobs += chunk.rollout_logprobs[0][:count].tolist()
    return rows


@pytest.fixture(scope="module", params=["recompute", "keep"])
def engine(
    request: pytest.FixtureRequest,
    process: EngineProcess,
    models: Mapping[str, Path],
    relay: object,
    fresh: object,
) -> Engine:
    start(process, models[VERSIONS[0]], weights="files", mode="inflight", inflight_cache=request.param)
    process.apply(in_process.begin, FIRST)
    process.apply(in_process.take_steps, BEFORE)
    sync(process, models[VERSIONS[1]], 1)
    process.apply(in_process.begin, SECOND)
    process.apply(in_process.take_steps, BETWEEN)
    sync(process, models[VERSIONS[2]], 2)
    chunks = process.apply(in_process.end)
    first, second = chunks[: len(FIRST)], chunks[len(FIRST) :]
    return Engine(process=process, keep=request.param == "keep", first=first, second=second)


def spans(chunk: RolloutChunk) -> list[tuple[int, int, int]]:
    return [(span.start, span.stop, span.version) for span in chunk.versions[0]]


def assert_answers(chunks: Sequence[RolloutChunk], expected: Answers) -> None:
    """Bit for bit those of an engine that loaded the files, whatever their versions."""
    for row, chunk in enumerate(chunks):
        np.testing.assert_array_equal(chunk.response_ids[0], expected.chunk.response_ids[row])
        np.testing.assert_array_equal(chunk.rollout_logprobs[0], expected.chunk.rollout_logprobs[row])


def test_a_version_begins_with_the_token_after_its_update(engine: Engine) -> None:
    """A step is a token of every response."""
    lengths = [len(chunk.response_ids[0]) for chunk in engine.first]
    ends = (0, BEFORE, BEFORE + BETWEEN, NEW_TOKENS)
    for length, chunk in zip(lengths, engine.first, strict=True):
        assert spans(chunk) == [(ends[v], min(ends[v + 1], length), v) for v in range(3) if ends[v] < length]
    assert min(lengths) <= BEFORE
    assert any(BEFORE < length <= BEFORE + BETWEEN for length in lengths)
    assert max(lengths) == NEW_TOKENS
    for chunk in engine.second:
        length = len(chunk.response_ids[0])
        assert spans(chunk) == [(0, min(BETWEEN, length), 1), *([(BETWEEN, length, 2)] if length > BETWEEN else [])]


def test_before_the_update_a_response_equals_that_of_an_engine_without_one(
    engine: Engine, untouched: list[RolloutChunk]
) -> None:
    for chunk, alone in zip(engine.first, untouched, strict=True):
        for column in ("response_ids", "rollout_logprobs"):
            ours, theirs = getattr(chunk, column)[0], getattr(alone, column)[0]
            np.testing.assert_array_equal(ours[:BEFORE], theirs[:BEFORE])
            assert len(theirs) > BEFORE or len(ours) == len(theirs)
        assert len(alone.response_ids[0]) > BEFORE or chunk.finished[0] == alone.finished[0]


def test_every_token_has_the_log_probability_of_its_version(engine: Engine, models: Mapping[str, Path]) -> None:
    dirs = [models[name] for name in VERSIONS]
    for asked, chunks in ((FIRST, engine.first), (SECOND, engine.second)):
        for expected, chunk in zip(version_logprobs(dirs, asked, chunks, keep=engine.keep), chunks, strict=True):
            np.testing.assert_allclose(chunk.rollout_logprobs[0], expected, rtol=0, atol=1e-4)


def test_greedy_responses_continue_as_fresh_engines_would(
    engine: Engine, relay: list[tuple[list[int], list[float]]]
) -> None:
    for chunk, (ids, logprobs) in zip(engine.first[-len(GREEDY) :], relay, strict=True):
        end = BEFORE if engine.keep else NEW_TOKENS
        assert chunk.response_ids[0][:end].tolist() == ids[:end]
        np.testing.assert_allclose(chunk.rollout_logprobs[0][:end], logprobs[:end], rtol=0, atol=1e-5)


def test_updates_with_identical_weights_change_no_token(
    engine: Engine, models: Mapping[str, Path], untouched: list[RolloutChunk]
) -> None:
    """The random numbers continue; with `recompute`, keys and values of the tokens so far are rounded elsewhere."""
    engine.begin(models[VERSIONS[0]], FIRST, 2)
    for steps in (1, 4, 0):
        engine.update(models[VERSIONS[0]])
        engine.process.apply(in_process.take_steps, steps)
    for chunk, alone in zip(engine.end(), untouched, strict=True):
        np.testing.assert_array_equal(chunk.response_ids[0], alone.response_ids[0])
        atol = 0 if engine.keep else 1e-5
        np.testing.assert_allclose(chunk.rollout_logprobs[0], alone.rollout_logprobs[0], rtol=0, atol=atol)
        assert chunk.finished == alone.finished


def test_requests_after_an_update_reuse_no_old_cache_blocks(
    engine: Engine, models: Mapping[str, Path], fresh: Mapping[str, Answers]
) -> None:
    """Some were submitted before it, without a step in between, and some afterwards."""
    engine.begin(models["qwen2"], requests())
    engine.process.apply(in_process.begin, requests())
    engine.update(models["qwen2_later"])
    engine.process.apply(in_process.begin, requests())
    chunks, count = engine.end(), len(requests())
    assert any(len(spans(chunk)) == 2 for chunk in chunks[:count])
    assert all(len(spans(chunk)) == 1 for chunk in chunks[count:])
    for begun in (chunks[count : 2 * count], chunks[2 * count :]):
        assert_answers(begun, fresh["qwen2_later"])


def test_an_update_of_an_idle_engine_leaves_no_old_cache_blocks(
    engine: Engine, models: Mapping[str, Path], fresh: Mapping[str, Answers]
) -> None:
    engine.begin(models["qwen2"], requests(), NEW_TOKENS)
    engine.update(models["qwen2_later"])
    assert_answers(engine.end(), fresh["qwen2"])
    assert_same(ask(engine.process), fresh["qwen2_later"])


def test_responses_in_progress_wait_through_an_aborted_sync(
    engine: Engine, models: Mapping[str, Path], fresh: Mapping[str, Answers]
) -> None:
    """Nothing is computed before the next whole sync, here of the weights with which they began."""
    engine.begin(models["qwen2"], requests())
    version, trainer = engine.process.apply(in_process.version), Trainer(engine.process, models["qwen2_later"])
    trainer.fail_to_sync(version + 1, corrupt=(0, 3), reason="for bucket 3 is corrupt")
    assert not engine.process.call("step")
    with pytest.raises(RemoteError, match="RuntimeError: engine 3 has the weights of two versions"):
        engine.process.apply(in_process.begin, requests())
    engine.update(models["qwen2"])
    chunks = engine.end()
    assert_answers(chunks, fresh["qwen2"])
    assert {version for chunk in chunks for _, _, version in spans(chunk)} == {version, version + 1}


def test_recomputation_may_exceed_the_tokens_of_one_step(engine: Engine, models: Mapping[str, Path]) -> None:
    """A step takes 4096 tokens on a CPU."""
    prompts = random_prompts(count=120, min_tokens=40, max_tokens=40, vocab_size=USED_VOCAB, seed=4)
    asked = sample_requests(prompts, 1, seed=6, step=1)
    engine.update(models["qwen2"])
    alone = [chunk for part in (asked[:60], asked[60:]) for chunk in generate(engine.process, part)]
    engine.begin(models["qwen2"], asked, 4)
    engine.update(models["qwen2"])
    for chunk, expected in zip(engine.end(), alone, strict=True):
        np.testing.assert_array_equal(chunk.response_ids[0], expected.response_ids[0])
        np.testing.assert_allclose(chunk.rollout_logprobs[0], expected.rollout_logprobs[0], rtol=0, atol=1e-5)
