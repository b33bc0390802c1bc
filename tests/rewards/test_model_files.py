"""Files beside a reward model, by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from megarl.algos.reward_shaping import ScoreScale
from megarl.rewards.model_files import read_scale, write_scale, write_statistics


def test_the_scale_round_trips_through_its_file(tmp_path: Path) -> None:
    scale = ScoreScale(mean=3.0, std=2.0, target_mean=1.0, target_std=0.5)
    write_scale(scale, tmp_path)
    assert read_scale(str(tmp_path)) == scale
    assert read_scale(None) == read_scale(str(tmp_path / "nothing")) == ScoreScale()


def test_statistics_of_pairs(tmp_path: Path) -> None:
    metrics = write_statistics(np.float32([[3.0, 1.0], [1.0, 1.0], [2.0, 4.0]]), tmp_path)
    statistics = json.loads((tmp_path / "reward_statistics.json").read_text())
    assert statistics["preferences"] == 3
    assert statistics["accuracy"] == pytest.approx(1 / 3), "a tie is no success"
    assert statistics["mean"] == pytest.approx({"chosen": 2.0, "rejected": 2.0, "margin": 0.0})
    assert statistics["std"] == pytest.approx(
        {"chosen": math.sqrt(2 / 3), "rejected": math.sqrt(2), "margin": math.sqrt(8 / 3)}
    )
    assert metrics["held_out/rejected_std"] == pytest.approx(math.sqrt(2))


def test_with_several_responses_the_margin_is_over_the_second_best(tmp_path: Path) -> None:
    metrics = write_statistics(np.float32([[3.0, 1.0, 2.0], [0.0, -4.0, 1.0]]), tmp_path)
    assert metrics["held_out/accuracy"] == 0.5
    assert (metrics["held_out/chosen_mean"], metrics["held_out/margin_mean"]) == (1.5, 0.0)
