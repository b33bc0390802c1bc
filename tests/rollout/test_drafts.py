"""Engines with drafts sample from the same distribution, and record its log-probabilities."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.rollout.drafts import DraftCounts
from megarl.types import Prompt, RolloutChunk, SampleRequest
from tests.rollout import in_process
from tests.rollout.conftest import rollout_config, start
from tests.rollout.engine_process import EngineProcess
from tests.rollout.models import MAX_LEN, USED_VOCAB
from tests.rollout.oracles import hf_greedy, hf_logits, truncated_logprobs
from tests.rollout.syncing import Trainer
from tests.rollout.test_kept_sets import check_kept

pytestmark = pytest.mark.e2e

DRAFTS = 4
NEW_TOKENS = 24
LONGEST = MAX_LEN - 2 * DRAFTS
SETTINGS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": None,
    "speculative": DRAFTS,
    "max_new_tokens": NEW_TOKENS,
    "max_model_len": LONGEST,
}
LAST = 7


@dataclass(frozen=True)
class Engine:
    """One vLLM for all tests, in a process of its own: another could not start there after Numba is loaded."""

    process: EngineProcess
    model_dir: Path

    def sample(self, asked: Sequence[SampleRequest], **changes: Any) -> RolloutChunk:
        settings = rollout_config(**{**SETTINGS, **changes})
        return self.process.apply(in_process.generate_with, settings, asked)

    def take_drafts(self) -> DraftCounts:
        return self.process.call("take_drafts")


@pytest.fixture(scope="module")
def engine(models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    process = EngineProcess(tmp_path_factory.mktemp("engine"))
    start(process, models["qwen2"], weights="files", kept_max=USED_VOCAB, **SETTINGS)
    yield Engine(process, models["qwen2"])
    process.close()


def repetitive(count: int, length: int = 40) -> list[SampleRequest]:
    """Requests whose prompts repeat their tokens."""
    asked: list[SampleRequest] = []
    for index in range(count):
        tokens = tuple(10 + (position + index) % 5 for position in range(length))
        asked.append(
            SampleRequest(sample_id=f"s{index}", prompt=Prompt(prompt_id=f"p{index}", token_ids=tokens), seed=index)
        )
    return asked


def test_the_likeliest_answers_are_those_without_drafts(engine: Engine) -> None:
    engine.take_drafts()
    chunk = engine.sample([replace(request, temperature=0.0) for request in repetitive(6)])
    for prompt, response in zip(chunk.prompt_ids, chunk.response_ids, strict=True):
        assert response.tolist() == hf_greedy(engine.model_dir, prompt.tolist(), NEW_TOKENS)
    counts = engine.take_drafts()
    assert counts.sampled == sum(chunk.response_ids.lengths)
    assert 0 < counts.accepted <= counts.drafted
    assert engine.take_drafts() == DraftCounts()


def test_answers_do_not_depend_on_others_also_where_they_end(engine: Engine) -> None:
    """Some responses take all of max_model_len, where they have no room for drafts."""
    asked = [*repetitive(6), *repetitive(6, LONGEST - NEW_TOKENS)]
    together = engine.sample(asked, temperature=0.3)
    for row, request in enumerate(asked):
        alone = engine.sample([request], temperature=0.3)
        np.testing.assert_array_equal(alone.response_ids[0], together.response_ids[row])
        np.testing.assert_allclose(alone.rollout_logprobs[0], together.rollout_logprobs[row], atol=1e-5)


def test_a_prompt_in_the_cache_gets_the_same_answers(engine: Engine) -> None:
    """Of 33 tokens, all but the last are a block of the cache."""
    asked = repetitive(4, 33)
    first = engine.sample(asked, temperature=0.9)
    again = engine.sample(asked, temperature=0.9)
    np.testing.assert_array_equal(first.response_ids.values, again.response_ids.values)


def test_a_response_ends_within_a_batch_of_drafts(engine: Engine) -> None:
    asked = [replace(request, temperature=0.0) for request in repetitive(6)]
    whole = engine.sample(asked, ignore_eos=True)
    end = int(whole.response_ids[0][9])
    engine.take_drafts()
    ended = engine.sample(asked, ignore_eos=True, stop_token_ids=(end,))
    for row, response in enumerate(ended.response_ids):
        longest = whole.response_ids[row].tolist()
        expected = longest[: longest.index(end) + 1] if end in longest else longest
        assert response.tolist() == expected
    counts = engine.take_drafts()
    assert counts.accepted <= counts.sampled - len(asked), "first tokens are no drafts"


@pytest.mark.matrix
def test_drafts_are_checked_on_every_rank(models: Mapping[str, Path], tmp_path: Path) -> None:
    process = EngineProcess(tmp_path)
    fields = {"temperature": 0.4, "top_p": 0.8, "top_k": 30}
    start(process, models["qwen2"], tp=2, weights="files", kept_max=USED_VOCAB, **{**SETTINGS, **fields})
    _, (chunk,) = process.apply(in_process.generate, repetitive(8), [8])
    check_kept(chunk, models["qwen2"], USED_VOCAB, **fields)
    assert process.call("take_drafts").accepted > 0
    process.close()


def test_recorded_sets_and_log_probabilities_are_of_the_model(engine: Engine) -> None:
    engine.take_drafts()
    fields = {"temperature": 0.4, "top_p": 0.8, "top_k": 30}
    check_kept(engine.sample(repetitive(12), **fields), engine.model_dir, USED_VOCAB, **fields)
    assert engine.take_drafts().accepted > 0


@pytest.mark.matrix
def test_pairs_of_tokens_have_the_models_distribution(engine: Engine) -> None:
    """The prompt has every likely pair, so that the second token of a response is nearly always drafted."""
    samples = 4000
    fields = {"temperature": 1.0, "top_p": 0.95, "top_k": 6}
    tokens = likely_pairs(engine.model_dir)
    expected = pair_probabilities(engine.model_dir, tokens, fields)
    prompt = Prompt(prompt_id="p", token_ids=tokens)
    asked = [SampleRequest(sample_id=f"s{seed}", prompt=prompt, seed=seed) for seed in range(samples)]
    engine.take_drafts()
    chunk = engine.sample(asked, ignore_eos=True, **fields, max_new_tokens=4)
    counts = engine.take_drafts()
    assert counts.drafted > samples / 2
    assert 0 < counts.accepted < counts.drafted
    found = Counter(tuple(row[:2].tolist()) for row in chunk.response_ids)
    assert set(found) <= set(expected)
    frequent = {pair: p for pair, p in expected.items() if p * samples > 5}
    observed = [found[pair] for pair in frequent]
    theirs = [p * samples for p in frequent.values()]
    rest = samples - sum(theirs)
    assert chance([*observed, samples - sum(observed)], [*theirs, rest]) > 1e-3


def test_a_draft_model_is_loaded_and_the_model_is_synced(models: Mapping[str, Path], tmp_path: Path) -> None:
    """The draft model has the weights that a sync brings at first, and then other ones."""
    draft = shutil.copytree(models["qwen2"], tmp_path / "draft")
    process = EngineProcess(tmp_path)
    start(process, models["qwen2"], kept_max=USED_VOCAB, **SETTINGS, draft_model=str(draft))
    asked = [replace(request, temperature=0.0) for request in repetitive(6)]
    shares: list[float] = []
    for version, name in enumerate(("qwen2", "qwen2_later")):
        Trainer(process, models[name]).sync(version)
        _, (chunk,) = process.apply(in_process.generate, asked, [6])
        for prompt, response in zip(chunk.prompt_ids, chunk.response_ids, strict=True):
            assert response.tolist() == hf_greedy(models[name], prompt.tolist(), NEW_TOKENS)
        shares.append(process.call("take_drafts").metrics()["rollout/draft_acceptance"])
        fields = {"temperature": 1.0, "top_p": 1.0, "top_k": USED_VOCAB}
        _, (chunk,) = process.apply(in_process.generate, repetitive(8), [8])
        check_kept(chunk, models[name], USED_VOCAB, **fields)
        mixed = [*repetitive(3), *repetitive(3, 33), *repetitive(3, LONGEST - NEW_TOKENS)]
        together = process.apply(in_process.generate, mixed, [1] * 9)[1]
        alone = process.apply(in_process.generate, mixed, [1] * 9, 1)[1]
        for one, other in zip(together, alone, strict=True):
            np.testing.assert_array_equal(one.response_ids.values, other.response_ids.values)
        process.call("take_drafts")
    process.close()
    assert shares[0] > 0.9 > 0.5 > shares[1]


def chance(observed: Sequence[float], expected: Sequence[float]) -> float:
    """The probability of counts that differ as much or more, by the chi-squared distribution."""
    distance = sum((found - mean) ** 2 / mean for found, mean in zip(observed, expected, strict=True))
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2), torch.tensor(distance / 2)))


def likely_pairs(model_dir: Path) -> tuple[int, ...]:
    """Tokens that end with `LAST`, before which it is followed by likely ids, and each of these by its likeliest."""
    (after_last,) = hf_logits(model_dir, [[LAST] * 50])
    likely = after_last[-1, 2:USED_VOCAB].topk(25).indices + 2
    tokens: list[int] = []
    for token, after in zip(likely.tolist(), hf_logits(model_dir, [[LAST, token] for token in likely]), strict=True):
        tokens += (LAST, token, int(after[-1, :USED_VOCAB].argmax()))
    return (*tokens, LAST)


def pair_probabilities(
    model_dir: Path, tokens: tuple[int, ...], fields: Mapping[str, Any]
) -> dict[tuple[int, int], float]:
    (logits,) = hf_logits(model_dir, [tokens])
    firsts = truncated_logprobs(logits[-1], **fields).exp()
    likely = firsts.nonzero().flatten().tolist()
    probabilities: dict[tuple[int, int], float] = {}
    for first, after in zip(likely, hf_logits(model_dir, [[*tokens, first] for first in likely]), strict=True):
        seconds = truncated_logprobs(after[-1], **fields).exp()
        for second in seconds.nonzero().flatten().tolist():
            probabilities[first, second] = float(firsts[first] * seconds[second])
    return probabilities
