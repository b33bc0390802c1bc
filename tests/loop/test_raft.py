"""Selections of samples, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.cluster import ray_api
from megarl.cluster.ray_worker import ChunkRefs
from megarl.config.schema import RAFTSettings
from megarl.groups.rollouts import Rollouts
from megarl.loop.raft import age_metrics, select_samples
from megarl.types import SampleInfo, VersionSpan

SCORES = [0.1, 0.9, np.nan, 0.2, 0.5, 0.4, 0.9, 0.7]
FINISHED = [True, False, True, True, True, True, True, True]


def chosen(raft: RAFTSettings, scores: Sequence[float] = SCORES, prompts: str = "aaaabbbb") -> list[int]:
    samples = [
        SampleInfo(
            sample_id=str(row), prompt_id=prompt, chunk=0, row=row, prompt_tokens=1, response_tokens=1, finished=end
        )
        for row, (prompt, end) in enumerate(zip(prompts, FINISHED, strict=True))
    ]
    return select_samples(np.array(scores, dtype=np.float32), samples, raft, 4).tolist()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 6]),
        ({"discard_unfinished": True}, [3, 6]),
        ({"min_score": 0.3, "discard_unfinished": True}, [6]),
        ({"min_score": 2.0}, []),
    ],
)
def test_raft_selects_the_best_of_each_prompt(options: dict[str, Any], expected: list[int]) -> None:
    assert chosen(RAFTSettings(**options)) == expected


def test_raft_selects_the_best_of_the_step() -> None:
    def top(fraction: float, **options: Any) -> RAFTSettings:
        return RAFTSettings.model_validate({"strategy": {"name": "top", "fraction": fraction}, **options})

    assert chosen(top(0.5)) == [6, 1, 7, 4], "of equals the later first"
    assert chosen(top(0.3, discard_unfinished=True)) == [6, 7]
    assert chosen(top(0.9)) == [6, 1, 7, 4, 5, 3, 0], "samples without a score are never selected"


def test_a_repeated_prompt_in_a_step_counts_twice() -> None:
    assert chosen(RAFTSettings(), prompts="aaaaaaaa") == [1, 6]


def test_without_any_score_nothing_is_selected() -> None:
    assert chosen(RAFTSettings(), scores=[np.nan] * 8) == []


def test_ages_are_those_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks; the second response of the first spans two versions."""
    monkeypatch.setattr(ray_api, "get", lambda ref: ref)
    spans = [[[(0, 2, 3)], [(0, 3, 2), (3, 4, 3)]], [[(0, 4, 4)]]]
    refs: Any = {
        chunk: SimpleNamespace(
            versions=[
                [VersionSpan(start=start, stop=stop, version=version, engine_id=0) for start, stop, version in of]
                for of in responses
            ]
        )
        for chunk, responses in enumerate(spans)
    }
    assert age_metrics(Rollouts(samples=(), chunks=ChunkRefs(refs)), 4, oldest=3) == {
        "staleness/mean": (3 * 1 + 3 * 2) / 10,
        "staleness/max": 2,
        "staleness/age_0": 0.4,
        "staleness/age_1": 0.3,
        "staleness/age_2": 0.3,
        "staleness/age_3": 0,
        "rollout/version_spans": 4 / 3,
    }
