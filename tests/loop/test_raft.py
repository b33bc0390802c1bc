"""Selections of samples, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from megarl.config.schema import RAFT
from megarl.config.schema.raft import BestOfStep
from megarl.loop.raft import selected
from megarl.types import SampleInfo

SCORES = [0.1, 0.9, np.nan, 0.2, 0.5, 0.4, 0.9, 0.7]
FINISHED = [True, False, True, True, True, True, True, True]


def chosen(raft: RAFT, scores: Sequence[float] = SCORES, prompts: str = "aaaabbbb") -> list[int]:
    samples = [
        SampleInfo(
            sample_id=str(row), prompt_id=prompt, chunk=0, row=row, prompt_tokens=1, response_tokens=1, finished=end
        )
        for row, (prompt, end) in enumerate(zip(prompts, FINISHED, strict=True))
    ]
    return selected(np.array(scores, dtype=np.float32), samples, raft, 4).tolist()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 6]),
        ({"discard_unfinished": True}, [3, 6]),
        ({"min_score": 0.3, "discard_unfinished": True}, [6]),
        ({"min_score": 2.0}, []),
    ],
)
def test_the_best_of_each_prompt(options: dict[str, Any], expected: list[int]) -> None:
    assert chosen(RAFT(**options)) == expected


def test_the_best_of_the_step() -> None:
    assert chosen(RAFT(strategy=BestOfStep(fraction=0.5))) == [6, 1, 7, 4], "of equals the later first"
    assert chosen(RAFT(strategy=BestOfStep(fraction=0.3), discard_unfinished=True)) == [6, 7]
    assert chosen(RAFT(strategy=BestOfStep(fraction=0.9))) == [6, 1, 7, 4, 5, 3, 0], "what has no score is never learnt"


def test_a_prompt_that_comes_twice_in_a_step_is_two() -> None:
    assert chosen(RAFT(), prompts="aaaaaaaa") == [1, 6]


def test_without_any_score_nothing_is_learnt() -> None:
    assert chosen(RAFT(), scores=[np.nan] * 8) == []
