"""The samples of runs as a table: a Parquet file with a row for each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final

from megarl.files import LineFollower, write_errors
from megarl.run.paths import RunPaths
from megarl.run.status.reading import StatusError

_ROWS: Final = 2000
"""Of a row group."""
_SECTIONS: Final = ("scores", "tokens")
"""Fields whose entries are columns."""


def export_samples(runs: Mapping[str, Path], path: Path) -> None:
    """Writes the samples of runs into a Parquet file.

    Args:
        runs: directories by name.

    Raises:
        StatusError: there are none.
        OSError: the file cannot be written.
    """
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    # Rewards and token values may come later in a run, so the columns are known at its end.
    groups = [(len(rows), pa.table(_columns(rows)).schema) for rows in _groups(runs)]
    found = [schema for _, schema in groups]
    if not found:
        raise StatusError(
            f"{', '.join(map(str, runs.values()))}: no samples: tracking.samples is 0, or none is there yet"
        )
    schema = pa.unify_schemas(found, promote_options="permissive")
    with write_errors(path), ParquetWriter(str(path), schema, compression="zstd") as writer:
        for (count, _), rows in zip(groups, _groups(runs), strict=False):  # a live run has more by now
            writer.write_table(pa.Table.from_pylist(rows[:count], schema))


def _groups(runs: Mapping[str, Path]) -> Iterator[list[dict[str, Any]]]:
    for name, run in runs.items():
        rows = ({"run": name, **_row(line)} for _, line in LineFollower(RunPaths(run).samples).read())
        while group := list(islice(rows, _ROWS)):
            yield group


def _row(line: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a sample without nesting; what has no type of its own, such as the row's other columns, is JSON."""
    row: dict[str, Any] = {}
    for name, value in line.items():
        if name in _SECTIONS:
            row |= {f"{name}/{part}": own for part, own in value.items()}
        elif name == "versions" or value is None or isinstance(value, str | int | float):
            row[name] = value
        else:
            row[name] = json.dumps(value, ensure_ascii=False)
    return row


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}
