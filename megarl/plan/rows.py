"""What became of the rows of each source of data, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.loop.preflight import Sets

_FAULTS = {"too_long": "too long", "empty": "empty", "equal": "with equal responses"}


def row_texts(sets: Sets) -> Mapping[str, str]:
    """How many rows of each source were read, and why some of them are left out; by the source's field."""
    faults: dict[str, Counter[str]] = {field: Counter() for field in sets.rows}
    for field, row in sets.left_out.rows:
        faults[field][_FAULTS[row.fault]] += 1
    return {field: _text(len(used), faults[field]) for field, used in sets.rows.items()}


def epochs(steps: int, size: int, count: int) -> str:
    """How often a run's steps go over a source.

    Args:
        steps: of the run.
        size: rows that make a step.
        count: rows that there are.
    """
    often = f"{steps * size / count:.3g}"
    return f"{often} epoch{'' if often == '1' else 's'} in {counted(steps, 'step')} of {size}"


def counted(count: int, noun: str, plural: str = "") -> str:
    """A number of things; their plural has an s at the end where none is given."""
    return f"{count} {noun}" if count == 1 else f"{count} {plural or noun + 's'}"


def _text(used: int, faults: Counter[str]) -> str:
    dropped = faults.total()
    if not dropped:
        return counted(used, "row")
    reasons = ", ".join(f"{count} {fault}" for fault, count in sorted(faults.items()))
    return f"{counted(used + dropped, 'row')}, {used} used, {dropped} left out ({reasons})"
