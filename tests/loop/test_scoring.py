"""What the scores of samples become: by hand, with samples that lie in their chunks in another order."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.config.schema import Algo, Reward, RewardFunction
from megarl.loop.evaluate import means_with_intervals
from megarl.loop.scoring import (
    Scale,
    Scoring,
    columns_of,
    group_outcomes,
    in_order,
    permutation_seed,
    total_scores,
)
from megarl.types import SampleInfo


def sample(prompt: str, index: int, chunk: int, row: int, *, finished: bool = True) -> SampleInfo:
    return SampleInfo(
        sample_id=f"1/{prompt}/{index}",
        prompt_id=prompt,
        chunk=chunk,
        row=row,
        prompt_tokens=1,
        response_tokens=1,
        finished=finished,
    )


SAMPLES = (
    sample("b", 0, 1, 1),
    sample("a", 0, 0, 1),
    sample("b", 1, 1, 0, finished=False),
    sample("a", 1, 0, 0),
    sample("c", 0, 2, 0),
)
VALUES = np.array([1, 2, 3, 4, 5], np.float32)


def test_values_go_where_their_samples_are_and_come_back() -> None:
    columns = columns_of(VALUES, SAMPLES)
    assert {chunk: column.tolist() for chunk, column in columns.items()} == {0: [4, 2], 1: [3, 1], 2: [5]}
    assert in_order(columns, SAMPLES).tolist() == VALUES.tolist()


def answered(*results: Any) -> Any:
    """A call that has these results."""
    return SimpleNamespace(wait=lambda: list(results))


def test_sources_are_in_the_order_of_the_samples() -> None:
    model = answered({0: np.float32([4, 2]), 2: np.float32([5])}, None, {1: np.float32([3, 1])})
    rules = answered(
        {1: {"f": np.float32([30, 10]), "g": np.float32([0, 1])}},
        {
            0: {"f": np.float32([40, 20]), "g": np.float32([0, 1])},
            2: {"f": np.float32([50]), "g": np.float32([1])},
        },
    )
    found = Scoring(samples=SAMPLES, model=model, rules=rules, scale=Scale(mean=1.0, std=2.0)).wait()
    assert {name: values.tolist() for name, values in found.items()} == {
        "reward_model": [0, 0.5, 1, 1.5, 2],
        "f": [10, 20, 30, 40, 50],
        "g": [1, 1, 0, 0, 1],
    }


def test_the_total_is_weighted_then_clipped_and_a_missing_end_has_its_own_score() -> None:
    functions = (RewardFunction(name="here:f", weight=2.0), RewardFunction(name="there:f", weight=-1.0))
    reward = Reward(weight=3.0, functions=functions)
    sources = {"reward_model": VALUES, "f_2": VALUES * 4, "f_1": np.float32([0, 0, 0, 1, -5])}
    plain = total_scores(sources, SAMPLES, reward, Algo(), seed=0)
    assert plain.tolist() == [-1, -2, -3, -2, -15]
    shaped = total_scores(sources, SAMPLES, reward, Algo(score_clip=2.0, missing_end_score=-7.0), seed=0)
    assert shaped.tolist() == [-1, -2, -7, -2, -2]


def test_a_shuffled_control_gives_the_same_scores_to_others() -> None:
    reward, count = Reward(shuffle=True), 100
    samples = [sample(str(index), 0, 0, index) for index in range(count)]
    scores = np.arange(count, dtype=np.float32)
    seeds = [permutation_seed(3, step) for step in (1, 2)]
    first, second = (total_scores({"reward_model": scores}, samples, reward, Algo(), seed=seed) for seed in seeds)
    again = total_scores({"reward_model": scores}, samples, reward, Algo(), seed=seeds[0])
    assert first.tolist() == again.tolist()
    assert first.tolist() != second.tolist()
    assert sorted(first) == sorted(second) == scores.tolist()
    assert sum(first == scores) < 10


def test_samples_are_compared_with_those_of_their_prompt() -> None:
    outcomes, metrics = group_outcomes(np.float32([0, 5, 2, 5, 9]), SAMPLES)
    deviation = math.sqrt(2)  # of 0 and 2, with Bessel's correction
    assert outcomes.tolist() == pytest.approx([-1 / deviation, 0, 1 / deviation, 0, 0], rel=1e-5)
    assert metrics["group/zero_std_fraction"] == pytest.approx(2 / 3)


def test_the_scale_of_reference_samples_is_kept_beside_the_model(tmp_path: Path) -> None:
    scale = Scale.of(np.float32([1, 3, 3, 5]))
    assert (scale.mean, scale.std) == (3, math.sqrt(2))
    scale.write(tmp_path)
    assert Scale.read(str(tmp_path)) == scale
    assert json.loads((tmp_path / "reward_normalisation.json").read_text()) == {"mean": 3.0, "std": math.sqrt(2)}
    assert scale.apply(np.float32([3, 5])).tolist() == pytest.approx([0, math.sqrt(2)])
    assert Scale.read(str(tmp_path / "elsewhere")) == Scale.read(None) == Scale(mean=0.0, std=1.0)


def test_an_interval_is_that_of_a_mean() -> None:
    found = means_with_intervals({"exact": np.float32([0, 1, 1, 0]), "one": np.float32([7])})
    assert found["eval/exact"] == 0.5
    assert found["eval/exact_ci95"] == pytest.approx(1.959964 * math.sqrt(1 / 3) / 2)
    assert found["eval/one"] == 7
    assert math.isnan(found["eval/one_ci95"])
