"""Prompts that are drawn by scores: what a step reads, and what it draws."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from megarl.algos.curriculum import KEPT, History
from megarl.data.prompt_curriculum import Curriculum
from megarl.errors import RunError

KEYS = ["c", "a", "d", "b"]


class Choice:
    """Takes the first prompts, and keeps what it was given."""

    def __init__(self) -> None:
        self.seen: list[History] = []
        self.returned: Any = None

    def __call__(self, history: History, count: int, random: np.random.Generator) -> Any:
        self.seen.append(history)
        return np.arange(count) if self.returned is None else self.returned


def curriculum(choice: Choice, staleness: int = 0) -> Curriculum:
    return Curriculum(KEYS, choice, name="mine:first", seed=7, staleness=staleness)


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_step_reads_the_scores_that_are_known_however_early_it_is_sampled(staleness: int) -> None:
    choice = Choice()
    drawn = curriculum(choice, staleness)
    for step in range(1, 13):
        drawn.note(step, {"a": [float(step), float(step + 1)], "b": [1.0] if step == 1 else [], "x": []})
        drawn.next(step + 1, 2, [])
        known = np.arange(max(1, step - staleness - KEPT + 1), step - staleness + 1)
        history = choice.seen[-1]
        lacking = KEPT - len(known)
        assert history.steps[0].tolist() == [0] * lacking + known.tolist()
        assert history.scores[0, lacking:].tolist() == (known + 0.5).tolist()
        assert history.samples[0].tolist() == [0] * lacking + [2] * len(known)
    assert (choice.seen[-1].samples.sum(1) > 0).tolist() == [True, True, False, False]


def test_all_prompts_are_drawn_before_one_is_drawn_again_in_a_step() -> None:
    drawn = curriculum(Choice())
    assert drawn.next(1, 3, []) == ["a", "b", "c"]
    assert drawn.next(1, 3, ["a", "b", "c"]) == ["d", "a", "b"]
    assert drawn.next(1, 6, []) == ["a", "b", "c", "d", "a", "b"]


def test_the_state_is_json_and_brings_back_the_draws() -> None:
    first, second = Choice(), Choice()
    one, two = curriculum(first), curriculum(second)
    for step in range(1, 4):
        one.note(step, {key: [step / 3, 0.1] for key in KEYS[step:]})
    two.load(json.loads(json.dumps(one.state())))
    assert one.next(4, 2, []) == two.next(4, 2, [])
    for name in ("scores", "samples", "steps"):
        np.testing.assert_array_equal(getattr(first.seen[-1], name), getattr(second.seen[-1], name))
    assert one.metrics(4, ["a", "d"]) == two.metrics(4, ["a", "d"])
    assert json.dumps(one.state()) == json.dumps(two.state())


def test_metrics_count_the_pools() -> None:
    drawn = curriculum(Choice())
    drawn.note(1, {"a": [1.0] * 8, "b": [0.0] * 8, "c": [0.0, 1.0]})
    assert drawn.metrics(2, ["c", "c", "d"]) == {
        "curriculum/unseen": 0.25,
        "curriculum/hard": 0.25,
        "curriculum/medium": 0.25,
        "curriculum/easy": 0.25,
        "curriculum/rate": 0.5,
    }


@pytest.mark.parametrize("returned", [[0], [0, 0], [0, 4], [-1, 2], [[0, 1]], None])
def test_a_function_must_return_different_indices(returned: Any) -> None:
    choice = Choice()
    choice.returned = [[0, 1], [1, 0]] if returned is None else returned
    with pytest.raises(RunError, match=r"mine:first must return 2 different indices from 0 to 3; it returned"):
        curriculum(choice).next(1, 2, [])
