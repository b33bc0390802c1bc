"""Selections of samples, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from megarl.config.schema import Selection
from megarl.loop.scoring import select_samples
from megarl.types import SampleInfo

SCORES = [0.1, 0.9, np.nan, 0.2, 0.5, 0.4, 0.9, 0.7]
FINISHED = [True, False, True, True, True, True, True, True]


def chosen(selection: Selection, scores: Sequence[float] = SCORES, prompts: str = "aaaabbbb") -> list[int]:
    samples = [
        SampleInfo(
            sample_id=str(row), prompt_id=prompt, chunk=0, row=row, prompt_tokens=1, response_tokens=1, finished=end
        )
        for row, (prompt, end) in enumerate(zip(prompts, FINISHED, strict=True))
    ]
    return select_samples(np.array(scores, dtype=np.float32), samples, selection, 4).tolist()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 6]),
        ({"discard_unfinished": True}, [3, 6]),
        ({"min_score": 0.3, "discard_unfinished": True}, [6]),
        ({"min_score": 2.0}, []),
    ],
)
def test_the_best_of_each_prompt_is_selected(options: dict[str, Any], expected: list[int]) -> None:
    assert chosen(Selection(**options)) == expected


def test_the_best_of_the_step_are_selected() -> None:
    def top(fraction: float, **options: Any) -> Selection:
        return Selection.model_validate({"by": {"name": "top", "fraction": fraction}, **options})

    assert chosen(top(0.5)) == [6, 1, 7, 4], "of equals the later first"
    assert chosen(top(0.3, discard_unfinished=True)) == [6, 7]
    assert chosen(top(0.9)) == [6, 1, 7, 4, 5, 3, 0], "samples without a score are never selected"


def test_a_repeated_prompt_in_a_step_counts_twice() -> None:
    assert chosen(Selection(), prompts="aaaaaaaa") == [1, 6]


def test_without_any_score_nothing_is_selected() -> None:
    assert chosen(Selection(), scores=[np.nan] * 8) == []
