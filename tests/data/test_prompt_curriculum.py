"""Prompts that are drawn by scores: what a step reads, and what it draws."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from megarl.algos.curriculum import DRAWS_KEPT, History, pools
from megarl.data.prompt_curriculum import Curriculum
from megarl.errors import RunError

KEYS = ["c", "a", "d", "b"]


class First:
    """Takes the first prompts, and keeps what it was given."""

    def __init__(self) -> None:
        self.seen: list[History] = []

    def __call__(self, history: History, count: int, random: np.random.Generator) -> Any:
        self.seen.append(history)
        return np.arange(count)


def curriculum(choose: Callable[..., Any], staleness: int = 0, keys: list[str] = KEYS) -> Curriculum:
    return Curriculum(keys, choose, name="mine:first", seed=7, staleness=staleness, score_range=(1.0, 3.0))


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_step_reads_the_scores_that_are_known_however_early_it_is_sampled(staleness: int) -> None:
    first = First()
    drawn = curriculum(first, staleness)
    for step in range(1, 13):
        drawn.note(step, {"a": [float(step), float(step + 1)], **({"b": []} if step == 1 else {})})
        drawn.next(step + 1, 4, [])
        known = np.arange(max(1, step - staleness - DRAWS_KEPT + 1), max(1, step - staleness + 1))
        history = first.seen[-1]
        lacking = DRAWS_KEPT - len(known)
        assert history.steps[0].tolist() == [0] * lacking + known.tolist()
        assert history.scores[0, lacking:].tolist() == (known + 0.5).tolist()
        assert history.solved[0, lacking:].tolist() == [
            np.mean([np.clip((score - 1) / 2, 0, 1) for score in (step, step + 1)]) for step in known
        ]
        assert history.samples[0].tolist() == [0] * lacking + [2] * len(known)
    assert (first.seen[-1].samples.sum(1) > 0).tolist() == [True, False, False, False]
    assert (first.seen[-1].steps.sum(1) > 0).tolist() == [True, True, False, False], "one draw failed"


def test_all_prompts_are_drawn_before_one_is_drawn_again_in_a_step() -> None:
    assert curriculum(First()).next(1, 3, []) == ["a", "b", "c"]
    assert curriculum(First()).next(1, 3, ["a", "b", "c"]) == ["d", "a", "b"]
    assert curriculum(First()).next(1, 6, []) == ["a", "b", "c", "d", "a", "b"]


def test_prompts_whose_scores_are_not_known_yet_wait() -> None:
    drawn = curriculum(First(), staleness=2, keys=list("abcdefg"))
    first = [drawn.next(step, 2, []) for step in (1, 2, 3)]
    assert first == [["a", "b"], ["c", "d"], ["e", "f"]]
    drawn.note(1, {"a": [1.0], "b": [1.0]})
    assert drawn.next(4, 2, []) == ["a", "b"]
    assert drawn.next(4, 2, ["a", "b"]) == ["c", "d"], "too few others are left"


def test_prompts_that_cannot_be_scored_do_not_fill_the_steps() -> None:
    keys = [f"p{index:02}" for index in range(40)]
    drawn = curriculum(pools, keys=keys)
    broken = set(keys[:4])
    taken = []
    for step in range(1, 31):
        prompts = drawn.next(step, 4, [])
        drawn.note(step, {key: [] if key in broken else [2.0, 2.0] for key in prompts})
        taken += prompts
    assert sum(key in broken for key in taken[-80:]) <= 12


@pytest.mark.parametrize("other", [1, 0, 3])
def test_the_state_is_json_and_brings_back_the_draws(other: int) -> None:
    """A resumed run may have another staleness."""
    first, second = First(), First()
    one, two = curriculum(first, 1), curriculum(second, other)
    for step in range(1, 15):
        one.next(step, 2, [])
        one.note(step, {key: [step / 3, 0.1] for key in KEYS[step % 3 :]})
    state = one.state()
    two.load(json.loads(json.dumps(state)))
    assert (json.dumps(two.state()) == json.dumps(state)) == (other == 1)
    kept = DRAWS_KEPT + min(1, other)
    for name in ("scores", "samples", "steps", "solved"):
        newest = [row[-kept:] for row in state[name]]
        assert [row[-kept:] for row in two.state()[name]] == newest
    if other == 1:
        assert one.next(15, 2, []) == two.next(15, 2, [])
        assert one.metrics(15, ["a", "d"]) == two.metrics(15, ["a", "d"])
        np.testing.assert_array_equal(first.seen[-1].solved, second.seen[-1].solved)


def test_metrics_count_the_pools() -> None:
    drawn = curriculum(First())
    drawn.note(1, {"a": [3.0] * 8, "b": [-1.0, 1.0] * 4, "c": [1.0, 3.0]})
    assert drawn.metrics(2, ["c", "c", "d"]) == {
        "curriculum/unknown": 0.25,
        "curriculum/hard": 0.25,
        "curriculum/medium": 0.25,
        "curriculum/easy": 0.25,
        "curriculum/rate": pytest.approx(0.5),
    }


WRONG: list[Any] = [[0], [0, 0], [0, 4], [-1, 2], [[0, 1]], [0.0, 1.0], [True, False], [[0], [1, 2]], None]


@pytest.mark.parametrize("returned", WRONG)
def test_a_function_must_return_different_indices(returned: Any) -> None:
    with pytest.raises(RunError, match=r"data\.curriculum: mine:first (must return 2 different integers|failed: )"):
        curriculum(lambda *_: returned).next(1, 2, [])


def test_a_function_that_fails_is_named() -> None:
    with pytest.raises(RunError, match="mine:first failed: ZeroDivisionError: integer division"):
        curriculum(lambda *_: 1 // 0).next(1, 2, [])
