"""The metrics that docs/metrics.md describes."""

from __future__ import annotations

import re
from pathlib import Path

_PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
_PLACEHOLDER = re.compile(r"[A-Z]+")


def undescribed(names: set[str]) -> set[str]:
    """Those of these metrics that the page does not describe; ``FUNCTION`` on the page stands for any name."""
    patterns = [re.compile(_PLACEHOLDER.sub(r"\\w+", name)) for name in _described()]
    return {name for name in names if not any(pattern.fullmatch(name) for pattern in patterns)}


def _described() -> set[str]:
    """The names in the first column of the page's tables."""
    rows = re.findall(r"^\| (`.*?`) \|", _PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
