"""The curves of the demo's three stages, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.sort_letters.results import Evaluation, evaluations, read_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[Mapping[str, Any]]
_PANELS = (
    ("sft", "sft/loss", "SFT: loss of the demonstrations"),
    ("reward_model", "reward_model/accuracy", "reward model: accuracy on pairs"),
    ("ppo", "objective/score", "PPO: reward-model score"),
    ("ppo", "objective/kl", "PPO: KL from the reference, nats per response"),
    ("ppo", "value/explained_variance", "PPO: explained variance of the critic"),
)
"""Stage, metric, title."""


def draw_curves(directory: Path, path: Path) -> None:
    """Draws the metrics of every step, and the true score on held-out prompts.

    Args:
        directory: of the demo.
        path: the PNG to write.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 8), layout="constrained")
    *places, last = figure.subplots(2, 3).flat
    for axes, (stage, metric, title) in zip(places, _PANELS, strict=True):
        _metric(axes, read_lines(directory / stage / "metrics.jsonl"), metric, title)
    _true_score(last, evaluations(directory / "ppo"))
    figure.savefig(path)


def _true_score(axes: Axes, measured: Sequence[Evaluation]) -> None:
    axes.errorbar(
        [evaluation.step for evaluation in measured],
        [evaluation.true_score.mean for evaluation in measured],
        yerr=[evaluation.true_score.half_width for evaluation in measured],
        marker="o",
        capsize=3,
    )
    axes.set(title="PPO: true score on held-out prompts, 95% intervals", xlabel="step", ylim=(0, 1))
    axes.grid(alpha=0.3)


def _metric(axes: Axes, rows: Rows, metric: str, title: str) -> None:
    axes.plot([row["step"] for row in rows], [row[metric] for row in rows])
    axes.set(title=title, xlabel="step")
    axes.grid(alpha=0.3)
