"""Rows of data, wherever they are: JSONL and Parquet files, Hugging Face data sets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from megarl.config.schema import SourceFields

SHOWN = 10
"""Broken rows that an error names; it counts the others."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row as it was found.

    Args:
        where: the file and the line, or the data set and the row.
        number: from 1, in its source.
        content: a line of JSON, or columns.
    """

    where: str
    number: int
    content: bytes | Mapping[str, Any]

    def columns(self) -> dict[str, Any]:
        """Its columns by name; those that are null are not there.

        Raises:
            ValueError: the line is not a JSON object.
        """
        content = _parsed(self.content) if isinstance(self.content, bytes) else self.content
        if not isinstance(content, Mapping):
            raise ValueError("a row must be a JSON object")
        return {name: value for name, value in cast(Mapping[str, Any], content).items() if value is not None}


def read_rows(source: SourceFields) -> Iterator[Row]:
    """The rows of a source, in its order.

    Raises:
        OSError: a file cannot be read.
        ValueError: there is no such file or data set, or it cannot be read as what it is.
    """
    path = Path(source.path)
    if path.suffix in _READERS:
        if source.subset or source.split:
            raise ValueError(f"{path} is a file: subset and split are for Hugging Face data sets")
        yield from _READERS[path.suffix](path)
    elif path.is_file():
        raise ValueError(f"{path}: a file of data ends in {' or '.join(_READERS)}")
    elif not path.is_dir() and (path.is_absolute() or source.path.startswith(".") or source.path.count("/") > 1):
        raise ValueError(f"{path}: there is no such directory, and no Hugging Face data set has such a name")
    else:
        yield from _dataset(source)


def parse_rows(source: SourceFields, parse: Callable[[Row, dict[str, Any]], T | None]) -> tuple[list[T], int]:
    """Reads a source to its end and makes something of every row.

    Args:
        source: with the columns to rename.
        parse: from a row and its columns, renamed; None leaves the row out, a ValueError says why it is broken.

    Returns:
        What was made, and how many rows were left out.

    Raises:
        OSError, ValueError: as read_rows; or rows are broken, of which the first are named with their reason; or none
            is left.
    """
    made: list[T] = []
    broken: list[str] = []
    dropped = 0
    for row in read_rows(source):
        try:
            item = parse(row, _renamed(row.columns(), source.columns))
        except ValueError as error:
            broken.append(f"{row.where}: {error}")
            continue
        if item is None:
            dropped += 1
        else:
            made.append(item)
    if broken:
        raise ValueError(_report(broken, of=len(made) + dropped + len(broken)))
    if not made:
        raise ValueError(f"{source.path}: " + (f"all {dropped} rows are too long" if dropped else "no rows"))
    return made, dropped


def _report(broken: list[str], of: int) -> str:
    """One broken row by itself; of several, how many there are and the first of them."""
    if len(broken) == 1:
        return broken[0]
    others = [f"and {len(broken) - SHOWN} more"] if len(broken) > SHOWN else []
    return "\n      ".join([f"{len(broken)} of {of} rows are broken:", *broken[:SHOWN], *others])


def _renamed(columns: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The columns under our names; ``names`` says which column of the source each of ours is."""
    missing = [theirs for theirs in names.values() if theirs not in columns]
    if missing:
        raise ValueError(f"there is no column {missing[0]!r}; there are {listed(columns)}")
    kept = {name: value for name, value in columns.items() if name not in names.values()}
    return {**kept, **{ours: columns[theirs] for ours, theirs in names.items()}}


def listed(names: Iterable[str]) -> str:
    """Names for a message."""
    return ", ".join(names) or "none"


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg}, column {error.colno}") from error


def _lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            yield Row(where=f"{path}, line {number}", number=number, content=line.rstrip(b"\r\n"))


def _parquet(path: Path) -> Iterator[Row]:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    number = 0
    with path.open("rb") as file:
        try:
            for batch in ParquetFile(file).iter_batches(batch_size=1024):
                for columns in batch.to_pylist():
                    number += 1
                    yield Row(where=f"{path}, row {number}", number=number, content=columns)
        except ArrowInvalid as error:
            raise ValueError(f"{path} cannot be read as Parquet after row {number}: {error}") from error


_READERS: Final[Mapping[str, Callable[[Path], Iterator[Row]]]] = {".jsonl": _lines, ".parquet": _parquet}


def _dataset(source: SourceFields) -> Iterator[Row]:
    """The rows of one split of a data set, of the hub or of a directory."""
    name = source.path if source.subset is None else f"{source.path} ({source.subset})"
    try:
        found = _saved(source) if _is_saved(source.path) else _loaded(source)
    except Exception as error:  # whatever a hub, a builder or a file's reader may raise
        kinds = " or ".join(_READERS)
        raise ValueError(
            f"{name} cannot be loaded as a Hugging Face data set (a file of data ends in {kinds}): {error}"
        ) from error
    if isinstance(found, dict):
        if len(found) != 1:
            raise ValueError(f"{name} has the splits {listed(found)}: name one")
        (found,) = found.values()
    split = f", {source.split}" if source.split else ""
    for number, columns in enumerate(found, start=1):
        yield Row(where=f"{name}{split}, row {number}", number=number, content=columns)


def _is_saved(path: str) -> bool:
    """Whether a directory is one that ``save_to_disk`` of the library datasets wrote."""
    return any((Path(path) / name).exists() for name in ("dataset_dict.json", "state.json"))


def _saved(source: SourceFields) -> Any:
    import datasets

    if source.subset is not None:
        raise ValueError(f"a saved data set has no subset {source.subset!r}")
    found = datasets.load_from_disk(source.path)
    if source.split is None:
        return found
    if not isinstance(found, dict) or source.split not in found:
        raise ValueError(f"there is no split {source.split!r}; there are {listed(map(str, found))}")
    return found[source.split]


def _loaded(source: SourceFields) -> Any:
    import datasets

    return datasets.load_dataset(source.path, source.subset, split=source.split)
