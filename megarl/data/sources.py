"""Rows of JSONL and Parquet files and of Hugging Face data sets."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from megarl.config.schema import Fault, SourceFields
from megarl.files import format_bytes, open_file, parse_json

_SHOWN = 10
"""Reasons that a report names; of others it counts the rows."""
_LONGEST_REASON = 500
_LONGEST_LINE = 256 << 20
"""Bytes of a line that is read."""


class UnusableRowError(ValueError):
    """A row can be read but not be trained on; a row that is too long has at least so many `tokens`."""

    def __init__(self, fault: Fault, message: str, tokens: int = 0) -> None:
        super().__init__(message)
        self.fault: Fault = fault
        self.tokens = tokens


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row as read from a source.

    Args:
        where: file and line, or data set and row.
        number: from 1, in its source.
        content: a line of JSON, or columns.
    """

    where: str
    number: int
    content: bytes | Mapping[str, Any]

    def columns(self) -> dict[str, Any]:
        """Returns the columns that are not null; raises ValueError if the line is not a JSON object."""
        content: Any = parse_json(self.content) if isinstance(self.content, bytes) else self.content
        if not isinstance(content, Mapping):
            raise ValueError("a row must be a JSON object")
        return {name: value for name, value in cast(Mapping[str, Any], content).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A row that is not used: file and line, or data set and row; its fault, and the reason in words."""

    where: str
    fault: Fault
    reason: str


@dataclass(frozen=True, kw_only=True)
class Rows[T]:
    """The items of a source, in its order, and the rows that are not used."""

    items: Sequence[T]
    left_out: Sequence[LeftOut]


def read_rows(source: SourceFields) -> Iterator[Row]:
    """Yields the rows of a source in order.

    Raises:
        OSError: a file cannot be read.
        ValueError: there is no such file or data set, or its name states another format.
    """
    path = Path(source.path)
    if path.suffix in _READERS:
        if source.subset or source.split:
            raise ValueError(f"{path} is a file: subset and split are for Hugging Face data sets")
        yield from _READERS[path.suffix](path)
    elif path.is_file():
        raise ValueError(f"{path}: a file of data ends in {' or '.join(_READERS)}")
    elif not path.is_dir() and (path.is_absolute() or source.path.startswith(".") or source.path.count("/") != 1):
        raise ValueError(f"{path}: there is no such directory, and the name of a Hugging Face data set is owner/name")
    else:
        yield from _dataset(source)


def parse_rows[T](
    source: SourceFields, parse: Callable[[Row, dict[str, Any]], T], drop: Collection[Fault] = ()
) -> Rows[T]:
    """Parses every row of a source.

    Args:
        parse: makes an item of a row and its renamed columns; a ValueError means that the row is broken.
        drop: faults of rows that are left out; rows with other faults are broken.

    Raises:
        OSError, ValueError: the source cannot be read, rows are broken, or none is left; the first rows are named.
    """
    made: list[T] = []
    left_out: list[LeftOut] = []
    broken: list[tuple[str, str]] = []
    longest = 0
    for row in read_rows(source):
        try:
            made.append(parse(row, _renamed(row.columns(), source.columns)))
        except UnusableRowError as error:
            if error.fault in drop:
                left_out.append(LeftOut(where=row.where, fault=error.fault, reason=str(error)))
            else:
                broken.append((row.where, str(error)))
                longest = max(longest, error.tokens)
        except ValueError as error:
            broken.append((row.where, str(error)))
    if broken:
        most = f"; the longest has at least {longest} tokens" if longest else ""
        heading = f"{len(broken)} of {len(made) + len(left_out) + len(broken)} rows are broken{most}:"
        raise ValueError("\n      ".join(([heading] if len(broken) > 1 else []) + _report(broken)))
    if not made:
        reasons = _report([(row.where, row.reason) for row in left_out])
        none_left = [f"none of its {len(left_out)} rows is of use:", *reasons] if left_out else ["no rows"]
        raise ValueError(f"{source.path}: " + "\n      ".join(none_left))
    return Rows(items=made, left_out=left_out)


def _report(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Returns a line per reason, with its first row and the number of others; rows are (where, reason)."""
    places: dict[str, list[str]] = defaultdict(list)
    for where, reason in rows:
        places[reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]}..."].append(where)
    lines = [
        f"{first}{f' (and {len(others)} more)' if others else ''}: {reason}"
        for reason, (first, *others) in list(places.items())[:_SHOWN]
    ]
    unnamed = sum(map(len, list(places.values())[_SHOWN:]))
    return [*lines, f"and {unnamed} more"] if unnamed else lines


def _renamed(columns: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Renames columns; `names` maps our names to the source's."""
    missing = [theirs for theirs in names.values() if theirs not in columns]
    if missing:
        raise ValueError(f"there is no column {missing[0]!r}; there are {listed(columns)}")
    kept = {name: value for name, value in columns.items() if name not in names.values()}
    return {**kept, **{ours: columns[theirs] for ours, theirs in names.items()}}


def listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _lines(path: Path) -> Iterator[Row]:
    with open_file(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE + 1), b""), start=1):
            if len(line) > _LONGEST_LINE:
                raise ValueError(f"{path}, line {number} has more than {format_bytes(_LONGEST_LINE)}")
            yield Row(where=f"{path}, line {number}", number=number, content=line.rstrip(b"\r\n"))


def _parquet(path: Path) -> Iterator[Row]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    number = 0
    with open_file(path) as file:
        try:
            for batch in ParquetFile(file).iter_batches(batch_size=1024):
                for columns in batch.to_pylist():
                    number += 1
                    yield Row(where=f"{path}, row {number}", number=number, content=columns)
        except ArrowException as error:
            raise ValueError(f"{path} cannot be read as Parquet after row {number}: {error}") from error


_READERS: Final[Mapping[str, Callable[[Path], Iterator[Row]]]] = {".jsonl": _lines, ".parquet": _parquet}


def _dataset(source: SourceFields) -> Iterator[Row]:
    """Yields the rows of one split of a data set, from the hub or a directory."""
    name = source.path if source.subset is None else f"{source.path} ({source.subset})"
    try:
        found = _load(source)
    except Exception as error:  # whatever a hub, a builder or a file's reader may raise
        kinds = " or ".join(_READERS)
        rule = f"cannot be loaded as a Hugging Face data set (a file of data ends in {kinds})"
        raise ValueError(f"{name} {rule}: {error}") from error
    if isinstance(found, dict):
        if len(found) != 1:
            raise ValueError(f"{name} has the splits {listed(found)}: name one")
        (found,) = found.values()
    split = f", {source.split}" if source.split else ""
    for number, columns in enumerate(found, start=1):
        yield Row(where=f"{name}{split}, row {number}", number=number, content=columns)


def _load(source: SourceFields) -> Any:
    import datasets

    saved = ("dataset_dict.json", "state.json")  # by save_to_disk
    if not any((Path(source.path) / file).exists() for file in saved):
        return datasets.load_dataset(source.path, source.subset, split=source.split)
    if source.subset is not None:
        raise ValueError(f"a saved data set has no subset {source.subset!r}")
    found = datasets.load_from_disk(source.path)
    if source.split is None:
        return found
    if not isinstance(found, dict) or source.split not in found:
        raise ValueError(f"there is no split {source.split!r}; there are {listed(map(str, found))}")
    return found[source.split]


@dataclass(frozen=True, kw_only=True)
class LeftOutRows:
    """The rows that a run does not use.

    Args:
        faults: the configured ones, for which rows are left out.
        rows: each with the configuration field of its source.
    """

    faults: frozenset[Fault] = frozenset()
    rows: Sequence[tuple[str, LeftOut]] = field(default_factory=tuple[tuple[str, LeftOut], ...])

    def metrics(self) -> dict[str, float]:
        """Returns the number of rows by fault."""
        counts = Counter(row.fault for _, row in self.rows)
        return {f"data/dropped_{fault}": counts[fault] for fault in sorted(self.faults)}

    def write(self, path: Path) -> None:
        """Writes a JSON object per row; no file without rows."""
        if self.rows:
            path.write_text("".join(json.dumps({"field": name, **asdict(row)}) + "\n" for name, row in self.rows))

    def message(self, path: Path) -> str:
        """Returns the message for the user: how many rows there are, the first of them, and the file of all."""
        lines = _report([(row.where, row.reason) for _, row in self.rows])
        return "\n  ".join([f"{len(self.rows)} rows are left out; {path} names them:", *lines])
