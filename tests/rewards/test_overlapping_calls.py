"""Concurrent calls: their number, the order of the scores, and the effect of a failure."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config.schema import Reward, RewardFunction
from megarl.rewards.functions import Completion
from megarl.rewards.scorer import Failures, RuleScorer
from tests.rewards.completions import completion

pytestmark = pytest.mark.process

NAN = math.nan


def overlapping(name: str, **fields: Any) -> RewardFunction:
    return RewardFunction(name=f"tests.rewards.overlapping_functions:{name}", **fields)


def numbered(count: int) -> list[Completion]:
    return [replace(completion("x" * index), prompt_id=f"{index}") for index in range(count)]


def score(
    function: RewardFunction,
    completions: Sequence[Completion],
    limit: float = 60,
    retries: int = 0,
    seconds: float = 120,
) -> tuple[list[float], Failures]:
    scorer = RuleScorer([function], None, Reward(time_limit=limit, retries=retries))
    scorer.start()  # which takes seconds of its own on a busy machine
    scores, failures = scorer.score({"own": 0}, completions, time.monotonic() + seconds)
    scorer.close()
    return scores["own"].tolist(), failures


@pytest.mark.parametrize("name", ["meets", "meets_in_threads"])
def test_calls_are_in_progress_together_up_to_the_limit(name: str) -> None:
    """A call only returns once three others are in progress."""
    function = overlapping(name, concurrency=4, args={"parties": 4})
    assert score(function, numbered(8)) == (list(range(8)), {})


def test_no_more_calls_are_in_progress_than_allowed() -> None:
    seen, _ = score(overlapping("crowd", concurrency=3), numbered(12))
    assert max(seen) == 3
    seen, _ = score(overlapping("crowd"), numbered(40))
    assert max(seen) == 32


def test_scores_keep_the_order_of_the_responses() -> None:
    assert score(overlapping("last_first"), numbered(8)) == (list(range(8)), {})


@pytest.mark.parametrize(
    "function",
    [
        overlapping("ranks", per="batch"),
        overlapping("ranks", per="batch", concurrency=2),
        overlapping("lengths", per="batch"),
    ],
    ids=["alone", "threads", "async"],
)
def test_scores_of_a_batch_keep_the_order_of_its_responses(function: RewardFunction) -> None:
    given = [completion("x" * length) for length in (2, 4, 1, 3)]
    scores, _ = score(function, given)
    assert sorted(range(4), key=scores.__getitem__) == [2, 0, 3, 1], "longer responses have higher scores"


def test_a_process_that_reads_nothing_is_ended_by_the_limit_of_a_call() -> None:
    function = RewardFunction(name="tests.rewards.functions:holds_the_interpreter", concurrency=3)
    large = [replace(each, response="x" * (1 << 20)) for each in numbered(3)]
    begun = time.monotonic()
    scores, failures = score(function, large, limit=0.5, seconds=10)
    assert time.monotonic() - begun < 20
    assert np.isnan(scores).all()
    assert {failure.failure.kind for failure in failures.values()} <= {"time", "deadline"}


def on_two(way: str) -> RewardFunction:
    return overlapping("fails_on_two", args={"way": way})


@pytest.mark.parametrize(
    ("function", "kind", "calls"),
    [
        (on_two("exits"), "SystemExit", 1),
        (on_two("interrupts"), "KeyboardInterrupt", 1),
        (on_two("raises"), "ConnectionError", 1),
        (on_two("waits"), "time", 2),
        (overlapping("stops_on_two"), "KeyboardInterrupt", 1),
    ],
)
def test_a_call_that_fails_loses_its_score_alone_and_the_process_continues(
    function: RewardFunction, kind: str, calls: int
) -> None:
    limit = 1.0 if kind == "time" else 10.0
    scores, failures = score(function, numbered(4), limit=limit, retries=calls - 1)
    assert np.isnan(scores).tolist() == [False, False, True, False]
    assert len({scores[0], scores[1], scores[3]}) == 1, "one process"
    (unscored,) = failures.values()
    assert (unscored.prompt_id, unscored.failure.kind, unscored.calls) == ("2", kind, calls)


@pytest.mark.parametrize(("name", "kind", "limit"), [("dies_on_two", "end", 60.0), ("sleeps_on_two", "time", 2.0)])
def test_calls_interrupted_by_a_process_crash_are_repeated(name: str, kind: str, limit: float) -> None:
    function = overlapping(name, concurrency=8)
    scores, failures = score(function, numbered(5), limit=limit, retries=1)
    np.testing.assert_array_equal(scores, [0, 1, NAN, 3, 4])
    (unscored,) = failures.values()
    assert (unscored.prompt_id, unscored.failure.kind, unscored.calls) == ("2", kind, 2)


def test_overlapping_calls_end_at_the_steps_time_limit() -> None:
    scores, failures = score(overlapping("sleeps_on_two", concurrency=2), numbered(5), seconds=4.0)
    assert math.isnan(scores[2])
    assert scores[:2] == [0, 1]
    assert {failure.failure.kind for failure in failures.values()} <= {"time", "deadline"}


def test_a_cached_answer_is_not_scored_again(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    scorer = RuleScorer([overlapping("counts_calls", cache=True, args={"notes": str(notes)})], None, Reward())
    first = [completion("a"), completion("bb"), completion("a"), completion("bb", answer="other row")]
    for given, expected in ((first, [1, 2, 1, 2]), ([*first[1:], completion("ccc")], [2, 1, 2, 3])):
        scores, _ = scorer.score({"own": 0}, given, time.monotonic() + 60)
        assert scores["own"].tolist() == expected
    scorer.close()
    assert notes.read_text().splitlines() == ["p0 a", "p0 bb", "p0 bb", "p0 ccc"]


def test_a_batch_with_a_cache_contains_only_new_answers() -> None:
    scorer = RuleScorer([overlapping("sizes", per="batch", cache=True)], None, Reward())
    for given, expected in ((numbered(3), [3, 3, 3]), (numbered(5), [3, 3, 3, 2, 2])):
        scores, _ = scorer.score({"own": 0}, given, time.monotonic() + 60)
        assert scores["own"].tolist() == expected
    scorer.close()
