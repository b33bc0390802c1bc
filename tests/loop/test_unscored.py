"""A run ends when its responses get no scores."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config import load
from megarl.errors import RunError
from megarl.loop.train import UnscoredSteps
from megarl.run.results import StepResult

DEBUG = Path(__file__).parents[2] / "configs" / "debug" / "grpo.yaml"
FAILURE = "reward function 'f' on prompt '3': Traceback\nKeyError: 'answer'"


def result(step: int, unscored: int) -> StepResult:
    metrics = {"rewards/unscored": unscored, "rollout/samples": 16}
    return StepResult(step=step, metrics=metrics, updates=[], failures=(FAILURE,) if unscored else ())


def limited(*overrides: str, stage: str = "grpo") -> UnscoredSteps:
    config = load(DEBUG.with_stem(stage), list(overrides))
    assert config.stage != "eval"
    return UnscoredSteps(config)


def test_three_consecutive_steps_without_scores_end_a_run_with_the_traceback() -> None:
    steps = limited("run.steps=9")
    for step, unscored in enumerate([16, 16, 15, 16, 16], start=1):
        steps.add(result(step, unscored))
    with pytest.raises(RunError, match="no response of the last 3 steps has a score") as caught:
        steps.add(result(6, 16))
    assert str(caught.value).endswith(FAILURE)


def test_a_run_shorter_than_the_limit_ends_at_its_last_step() -> None:
    steps = limited("run.steps=1")
    with pytest.raises(RunError, match="the last 1 step has"):
        steps.add(result(1, 16))


def test_null_never_ends_a_run_and_other_stages_have_no_scores() -> None:
    steps = limited("run.steps=9", "reward.max_unscored_steps=null")
    for step in range(1, 10):
        steps.add(result(step, 16))
    limited(stage="sft").add(StepResult(step=1, metrics={"sft/loss": 1.0}, updates=[]))
