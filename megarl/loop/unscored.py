"""Responses without a score, as a run tells of them: in the steps that have some, and over all steps at its end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_SAMPLED: Final = "rollout/samples"
_UNSCORED: Final = "rewards/unscored"


def told_of_step(step: int, metrics: Mapping[str, float]) -> str | None:
    """A line about the responses of a step that have no score; None where all have one.

    Args:
        step: of the run.
        metrics: of the step.
    """
    if not metrics.get(_UNSCORED):
        return None
    of_sources = ", ".join(
        f"{name.removeprefix(f'{_UNSCORED}/')}: {count}"
        for name, count in metrics.items()
        if name.startswith(f"{_UNSCORED}/") and count
    )
    return f"step {step}: {metrics[_UNSCORED]} of {metrics[_SAMPLED]} responses have no score ({of_sources})"


def count_responses(metrics: Path) -> dict[str, int]:
    """How many responses a run has ``sampled``, and how many of them are ``unscored``; empty where it samples none.

    Args:
        metrics: the file with a line per step, which a run that goes on continues.
    """
    steps = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    of_samples = [step for step in steps if _UNSCORED in step]
    if not of_samples:
        return {}
    names = {"sampled": _SAMPLED, "unscored": _UNSCORED}
    return {name: sum(step[metric] for step in of_samples) for name, metric in names.items()}
