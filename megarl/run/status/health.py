"""What is not as it should be with a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_SKIPPED = "/skipped"
_UNSCORED, _SAMPLED = "rewards/unscored", "rollout/samples"
_SHOWN = 4

Lines = Sequence[Mapping[str, Any]]


def troubles(lines: Lines, logs: Path) -> list[str]:
    """A sentence for each thing that wants a look.

    Args:
        lines: of metrics.jsonl, the last ones.
        logs: directory with what the run's processes print.
    """
    return [*_not_finite(lines), *_skipped(lines), *_unscored(lines), *_printed(logs)]


def _not_finite(lines: Lines) -> Iterator[str]:
    names = [name for name, value in lines[-1].items() if value is None] if lines else []
    if names:
        yield f"step {lines[-1]['step']}: not a finite number: {_few(names)}"


def _skipped(lines: Lines) -> Iterator[str]:
    """Optimizer steps that were not taken, as their gradients were not finite."""
    roles = dict.fromkeys(name for line in lines for name in line if name.endswith(_SKIPPED))
    for name in roles:
        steps = [line["step"] for line in lines if line.get(name)]
        if steps:
            part = f"{len(steps)} of the last {len(lines)} steps, last in step {steps[-1]}"
            yield f"{name.removesuffix(_SKIPPED)}: gradients that were not finite, and were skipped, in {part}"


def _unscored(lines: Lines) -> Iterator[str]:
    unscored = sum(line.get(_UNSCORED) or 0 for line in lines)
    if unscored:
        sampled = sum(line.get(_SAMPLED) or 0 for line in lines)
        yield f"{unscored} of {sampled} responses of the last {len(lines)} steps have no score"


def _printed(logs: Path) -> Iterator[str]:
    """Logs of processes, which are empty as long as nothing is wrong."""
    files = sorted(path for path in logs.glob("*.log") if path.stat().st_size)
    if files:
        yield f"printed into {logs}: {_few([path.name for path in files])}"


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
