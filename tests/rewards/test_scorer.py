"""Scores of chunks: calls, retries, and samples without a score."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.config.schema import Reward, RewardFunction
from megarl.rewards.adapters import Failure
from megarl.rewards.scorer import Failures, RuleScorer, Scores, Unscored
from megarl.types import Prompt, Ragged, RolloutChunk
from tests.rewards.completions import decode, own, prompt, rollout

pytestmark = pytest.mark.process

PROMPTS = [prompt("pa", "a", answer="one"), prompt("pb", "b", answer="three"), prompt("pa", "a", answer="one")]
CHUNK = rollout(PROMPTS, ["one", "three", "five!"], [True, False, True])
FUNCTIONS = [
    RewardFunction(name="exact_match", weight=9.0),
    own("length", scale=0.5),
    own("seen"),
    own("quotient", size=3),
    own("stubborn"),
    RewardFunction(name="contains"),
]
NUMBERS = {function.name.rpartition(":")[2]: number for number, function in enumerate(FUNCTIONS)}


@pytest.fixture(scope="module")
def scorer() -> Iterator[RuleScorer]:
    made = RuleScorer(FUNCTIONS, decode, Reward(time_limit=1.5, retries=1))
    made.start()
    yield made
    made.close()


def score(
    scorer: RuleScorer,
    functions: Mapping[str, int],
    seconds: float = 60,
    chunk: RolloutChunk = CHUNK,
    prompts: Sequence[Prompt] = PROMPTS,
) -> tuple[Scores, Failures]:
    completions = scorer.completions(chunk, dict(enumerate(prompts)))
    return scorer.score(functions, completions, time.monotonic() + seconds)


def scored(
    functions: Mapping[str, RewardFunction],
    seconds: float = 60,
    retries: int = 0,
    chunk: RolloutChunk = CHUNK,
    prompts: Sequence[Prompt] = PROMPTS,
) -> tuple[Scores, Failures]:
    """Scores in a process of their own, which gets no text."""
    made = RuleScorer(tuple(functions.values()), None, Reward(time_limit=60, retries=retries))
    made.start()
    with closing(made):
        indices = {name: index for index, name in enumerate(functions)}
        return score(made, indices, seconds, chunk, prompts)


def test_every_function_scores_every_sample_unweighted(scorer: RuleScorer) -> None:
    scores, unscored = score(scorer, {name: NUMBERS[name] for name in ("exact_match", "length", "seen")})
    assert {label: column.tolist() for label, column in scores.items()} == {
        "exact_match": [1, 1, 0],
        "length": [1.5, 2.5, 2.5],
        "seen": [1, 1, 0],
    }
    assert all(column.dtype == np.float32 for column in scores.values())
    assert not unscored


def test_a_failed_call_leaves_its_sample_without_a_score_only(scorer: RuleScorer) -> None:
    names = ("quotient", "length", "stubborn")
    scores, unscored = score(scorer, {name: NUMBERS[name] for name in names})
    np.testing.assert_array_equal(scores["quotient"], np.float32([math.nan, 0.5, 0.5]))
    assert scores["length"].tolist() == [1.5, 2.5, 2.5]
    np.testing.assert_array_equal(scores["stubborn"], np.float32([1, math.nan, 1]))
    (quotient, stubborn) = unscored
    assert (quotient, stubborn) == (("quotient", "ZeroDivisionError"), ("stubborn", "time"))
    assert (unscored[quotient].prompt_id, unscored[quotient].calls) == ("a", 2)
    assert unscored[quotient].failure.reason.endswith("ZeroDivisionError: float division by zero")
    slow = Failure(kind="time", reason="it took longer than 1.5 s, and was ended")
    assert unscored[stubborn] == Unscored(prompt_id="b", failure=slow, calls=2)


def test_a_failing_function_is_retried(tmp_path: Path) -> None:
    notes = str(tmp_path / "notes")
    for retries, expected in ((2, [3, 3, 4]), (1, [math.nan, math.nan, 3])):
        Path(notes).unlink(missing_ok=True)
        flaky = {"flaky": own("fails_at_first", notes=notes, failures=2)}
        scores, unscored = scored(flaky, retries=retries)
        np.testing.assert_array_equal(scores["flaky"], np.float32(expected))
        assert len(unscored) == (retries == 1)


def test_a_step_with_hanging_functions_ends_within_its_time_limit() -> None:
    start = time.monotonic()
    scores, unscored = scored({"sleeps": own("sleeps")}, seconds=0.5, retries=3)
    assert time.monotonic() - start < 60
    assert np.isnan(scores["sleeps"]).all()
    assert [own.calls for own in unscored.values()] == [1, 0], "the first sample was tried"
    assert set(unscored) == {("sleeps", "time"), ("sleeps", "deadline")}


def test_without_a_tokenizer_functions_get_ids_and_no_text() -> None:
    scores, _ = scored({"contains": RewardFunction(name="contains"), "length": own("length")})
    assert scores["contains"].tolist() == [0, 0, 0]
    assert scores["length"].tolist() == [3, 5, 5]


def test_the_first_failure_of_each_kind_is_logged() -> None:
    returned = [math.nan, 1.0, "one", math.inf, "two"]
    prompts = [prompt(f"p{index}", f"{index}", returns=value) for index, value in enumerate(returned)]
    chunk = rollout(prompts, ["."] * len(prompts), [True] * len(prompts))
    scores, failures = scored({"anything": own("anything")}, chunk=chunk, prompts=prompts)
    np.testing.assert_array_equal(scores["anything"], np.float32([math.nan, 1, math.nan, math.nan, math.nan]))
    assert {kind: own.prompt_id for kind, own in failures.items()} == {
        ("anything", "float"): prompts[0].prompt_id,
        ("anything", "str"): prompts[2].prompt_id,
    }


def test_the_response_of_a_conversation_is_that_of_its_last_turn(scorer: RuleScorer) -> None:
    whole = rollout(PROMPTS[:2], ["ask=47>47", "one"], [True, True])
    ids = whole.response_ids
    mask = [np.ones(len(row), dtype=bool) for row in ids]
    mask[0][3:7] = False  # =47>
    turns = [[3, int(mask[0].sum())], [len(ids[1])]]
    talks = replace(whole, loss_mask=Ragged.from_rows(mask, np.bool_), turns=Ragged.from_rows(turns, np.int32))
    first, second = scorer.completions(talks, dict(enumerate(PROMPTS[:2])))
    assert [first.response, second.response] == ["47", "one"]
    assert first.response_ids == tuple(ids[0].tolist())
    assert first.response_tokens == mask[0].sum()
