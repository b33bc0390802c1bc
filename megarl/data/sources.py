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
"""Reasons that a report names."""
_LONGEST_REASON = 500
_INDENT = "\n      "
_LONGEST_LINE = 256 << 20
"""Bytes of a line that is read."""


class UnusableRowError(ValueError):
    """A row can be read but not be trained on; `tokens` is a lower bound if it is too long."""

    def __init__(self, fault: Fault, message: str, tokens: int = 0) -> None:
        super().__init__(message)
        self.fault: Fault = fault
        self.tokens = tokens


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row as read from a source.

    Args:
        where: file and line, or data set and row.
        number: number in its source, from 1.
        content: line of JSON, or columns.
    """

    where: str
    number: int
    content: bytes | Mapping[str, Any]

    def columns(self) -> dict[str, Any]:
        """Returns the columns that are not null; raises ValueError unless it is a JSON object."""
        content: Any = self.content
        if isinstance(content, bytes):
            content = parse_json(content)
        if not isinstance(content, Mapping):
            raise ValueError("a row must be a JSON object")
        return {name: value for name, value in cast(Mapping[str, Any], content).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A row that is not used: its place, its fault, and the reason in words."""

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
        parse: function that makes an item of a row and its renamed columns; a ValueError means that
            the row is broken.
        drop: faults of rows that are left out; rows with other faults are broken.

    Raises:
        OSError, ValueError: the source cannot be read, rows are broken, or none is left; the first
            rows are named.
    """
    made: list[T] = []
    left_out: list[LeftOut] = []
    broken: list[tuple[str, str]] = []
    longest = 0
    for row in read_rows(source):
        try:
            made.append(parse(row, _renamed(row.columns(), source.columns)))
        except ValueError as error:
            if isinstance(error, UnusableRowError) and error.fault in drop:
                left_out.append(LeftOut(where=row.where, fault=error.fault, reason=str(error)))
                continue
            broken.append((row.where, str(error)))
            longest = max(longest, getattr(error, "tokens", 0))
    if broken:
        lines = _report(broken)
        if len(broken) > 1:
            heading = f"{len(broken)} of {len(made) + len(left_out) + len(broken)} rows are broken"
            if longest:
                heading += f"; the longest has at least {longest} tokens"
            lines.insert(0, f"{heading}:")
        raise ValueError(_INDENT.join(lines))
    if not made:
        reasons = _report([(row.where, row.reason) for row in left_out])
        raise ValueError(_INDENT.join([f"{source.path}: none of its {len(left_out)} rows is of use", *reasons]))
    return Rows(items=made, left_out=left_out)


def _report(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Returns a line per reason, with its first row and the number of others."""
    places: dict[str, list[str]] = defaultdict(list)
    for where, reason in rows:
        if len(reason) > _LONGEST_REASON:
            reason = f"{reason[:_LONGEST_REASON]}..."
        places[reason].append(where)
    lines: list[str] = []
    for reason, (first, *others) in places.items():
        more = f" (and {len(others)} more)" if others else ""
        lines.append(f"{first}{more}: {reason}")
    if len(lines) > _SHOWN:
        lines[_SHOWN:] = [f"and {len(lines) - _SHOWN} more reasons"]
    return lines


def _renamed(columns: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Renames columns; `names` maps our names to the source's."""
    renamed = {name: value for name, value in columns.items() if name not in names.values()}
    for ours, theirs in names.items():
        if theirs not in columns:
            raise ValueError(f"a row must have the column {theirs!r}; its columns are {listed(columns)}")
        renamed[ours] = columns[theirs]
    return renamed


def listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _lines(path: Path) -> Iterator[Row]:
    with open_file(path) as file:
        number = 0
        while line := file.readline(_LONGEST_LINE + 1):
            number += 1
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
    name = source.path
    if source.subset is not None:
        name += f" ({source.subset})"
    try:
        found = _load(source)
    except Exception as error:  # whatever a hub, a builder or a file's reader may raise
        rule = f"cannot be loaded as a Hugging Face data set (a file of data ends in {' or '.join(_READERS)})"
        raise ValueError(f"{name} {rule}: {error}") from error
    if isinstance(found, dict):
        if len(found) != 1:
            raise ValueError(f"{name} has the splits {listed(found)}: name one")
        (found,) = found.values()
    if source.split:
        name += f", {source.split}"
    for number, columns in enumerate(found, start=1):
        yield Row(where=f"{name}, row {number}", number=number, content=columns)


def _load(source: SourceFields) -> Any:
    import datasets

    directory = Path(source.path)
    is_saved = (directory / "dataset_dict.json").exists() or (directory / "state.json").exists()  # by save_to_disk
    if not is_saved:
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
        faults: configured faults, for which rows are left out.
        rows: rows that are left out, each with the configuration field of its source.
    """

    faults: frozenset[Fault] = frozenset()
    rows: Sequence[tuple[str, LeftOut]] = field(default_factory=tuple[tuple[str, LeftOut], ...])

    def metrics(self) -> dict[str, float]:
        """Returns the number of rows by fault."""
        counts = Counter(row.fault for _, row in self.rows)
        return {f"data/dropped_{fault}": counts[fault] for fault in sorted(self.faults)}

    def write(self, path: Path) -> None:
        """Writes a JSON object per row; no file without rows."""
        lines = [json.dumps({"field": name, **asdict(row)}) + "\n" for name, row in self.rows]
        if lines:
            path.write_text("".join(lines))

    def message(self, path: Path) -> str:
        """Returns the message for the user, with the first rows."""
        lines = _report([(row.where, row.reason) for _, row in self.rows])
        return "\n  ".join([f"{len(self.rows)} rows are left out; {path} names them:", *lines])
