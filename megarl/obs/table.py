"""Metrics as a table for people."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich import box
from rich.table import Table

from megarl.obs.metrics import short

_INTERVAL = "_ci95"


def metrics_table(metrics: Mapping[str, float]) -> Table:
    """A row per metric, with the half width of its 95% interval where it has one.

    Metrics are named ``prefix/name``. Those of each prefix have columns of their own; a number that is not known is a
    dash.

    Args:
        metrics: among them ``prefix/name_ci95``, the half width of the interval of ``prefix/name``.
    """
    prefixes = list(dict.fromkeys(name.partition("/")[0] for name in metrics))
    rows = dict.fromkeys(name.partition("/")[2] for name in metrics if not name.endswith(_INTERVAL))
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("metric", no_wrap=True)
    for prefix in prefixes:
        table.add_column(prefix, justify="right", no_wrap=True)
        table.add_column("± 95%", justify="right", style="dim", no_wrap=True)
    for row in rows:
        cells = (
            _shown(metrics.get(f"{prefix}/{row}{ending}"), absent)
            for prefix in prefixes
            for ending, absent in (("", "-"), (_INTERVAL, ""))
        )
        table.add_row(row, *cells)
    return table


def _shown(value: float | None, absent: str) -> str:
    if value is None:
        return absent
    return "-" if math.isnan(value) else short(value)
