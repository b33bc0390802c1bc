"""What the runs of the demo came to, read from their directories."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRUE_SCORE = "exact_match"
"""The checker's name in the metrics of an evaluation."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean, and half the width of its 95% interval."""

    mean: float
    half_width: float

    def __sub__(self, other: Estimate) -> Estimate:
        """The difference of two estimates, taken as independent: as they share prompts and seeds, they are closer."""
        return Estimate(mean=self.mean - other.mean, half_width=math.hypot(self.half_width, other.half_width))


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a policy scores on the held-out prompts.

    Args:
        step: of PPO after which it was measured; 0 is before the first.
        samples: answers.
        true_score: part of the answers that are right.
        reward_model_score: in standard deviations of the scores of the fine-tuned model's answers; 0 is their mean.
    """

    step: int
    samples: int
    true_score: Estimate
    reward_model_score: Estimate


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A held-out prompt, an answer to it, and whether the answer is right."""

    prompt: str
    response: str
    right: bool


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def evaluations(run_dir: Path) -> list[Evaluation]:
    """The evaluations of a PPO run, the first before its first step, the last after its last one."""
    return [
        Evaluation(
            step=row["step"],
            samples=row["eval/samples"],
            true_score=_estimate(row, f"eval/{TRUE_SCORE}"),
            reward_model_score=_estimate(row, "eval/score"),
        )
        for row in read_lines(run_dir / "evaluations.jsonl")
    ]


def samples(run_dir: Path, step: int) -> list[Sample]:
    """The answers to held-out prompts that a PPO run kept of the evaluation after a step."""
    return [
        Sample(prompt=row["prompt"], response=row["response"], right=row["scores"][TRUE_SCORE] == 1.0)
        for row in read_lines(run_dir / "samples.jsonl")
        if row["kind"] == "evaluation" and row["step"] == step
    ]


def run_seconds(run_dir: Path) -> float:
    """What a run took, as it has said itself."""
    return json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["seconds"]


def summary(directory: Path) -> dict[str, float]:
    """The demo's results by name.

    Args:
        directory: with the run directories ``reward_model`` and ``ppo``.
    """
    before, *_, after = evaluations(directory / "ppo")
    accuracy = read_lines(directory / "reward_model" / "evaluations.jsonl")[-1]["eval/accuracy"]
    start = json.loads((directory / "ppo" / "summary.json").read_text(encoding="utf-8"))["start"]
    return {
        "true_score_before": before.true_score.mean,
        "true_score_before_ci95": before.true_score.half_width,
        "true_score_after": after.true_score.mean,
        "true_score_after_ci95": after.true_score.half_width,
        "reward_model_score_before": before.reward_model_score.mean,
        "reward_model_score_before_ci95": before.reward_model_score.half_width,
        "reward_model_score_after": after.reward_model_score.mean,
        "reward_model_score_after_ci95": after.reward_model_score.half_width,
        "reward_model_accuracy": accuracy,
        "sync_logprob_mean_abs_diff": start["sync/logprob_mean_abs_diff"],
        "sync_logprob_max_abs_diff": start["sync/logprob_max_abs_diff"],
    }


def _estimate(row: Mapping[str, float], name: str) -> Estimate:
    return Estimate(mean=row[name], half_width=row[f"{name}_ci95"])
