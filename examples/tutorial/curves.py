"""Draws the tutorial's runs: `python -m examples.tutorial.curves PICTURE RUN...`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from examples.sort_letters.results import read_lines


def draw(picture: Path, runs: Sequence[Path]) -> None:
    """Draws the held-out reward with its 95% intervals, and the length of the responses in training."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    reward, length = figure.subplots(1, 2)
    for run in runs:
        evaluations, steps = read_lines(run / "evaluations.jsonl"), read_lines(run / "metrics.jsonl")
        means, widths = ([row[f"eval/reward{end}"] for row in evaluations] for end in ("", "_ci95"))
        reward.errorbar([row["step"] for row in evaluations], means, yerr=widths, marker=".", capsize=3, label=run.name)
        length.plot([row["step"] for row in steps], [row["response_length/mean"] for row in steps], label=run.name)
    reward.set(title="held-out reward, with 95% intervals", xlabel="step", ylim=(0, 1.05))
    length.set(title="length of the responses, tokens", xlabel="step", ylim=(0, None))
    for axes in (reward, length):
        axes.grid(alpha=0.2)
        axes.legend()
    with rc_context({"svg.hashsalt": "tutorial"}):
        figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]), [Path(run) for run in sys.argv[2:]])
