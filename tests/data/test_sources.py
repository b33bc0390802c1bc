"""Rows of files and data sets written by other libraries, and reports of broken rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.config.schema import SourceFields
from megarl.data.sources import LeftOut, Row, UnusableRowError, parse_rows, read_rows
from tests.data.rows import jsonl

ROWS: list[dict[str, Any]] = [
    {"prompt": "a", "answer": 3, "chat": [{"role": "user", "content": "x"}]},
    {"prompt": "b", "answer": None, "chat": [{"role": "user", "content": "y"}, {"role": "system", "content": "z"}]},
    {"prompt": "ü\u2028", "answer": 5, "chat": []},
]


def read(source: SourceFields) -> list[tuple[int, dict[str, Any]]]:
    return [(row.number, row.columns()) for row in read_rows(source)]


def expected(rows: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    return [
        (i, {name: value for name, value in row.items() if value is not None}) for i, row in enumerate(rows, start=1)
    ]


@pytest.fixture(autouse=True)
def cache_in_a_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def test_files(tmp_path: Path) -> None:
    source = jsonl(tmp_path, ROWS)
    assert read(source) == expected(ROWS)
    assert [row.where for row in read_rows(source)] == [f"{source.path}, line {i}" for i in (1, 2, 3)]
    Path(source.path).write_bytes(json.dumps(ROWS[0]).encode("utf-8-sig"))
    assert read(source) == expected(ROWS[:1]), "a byte order mark and no newline at the end"
    parquet = SourceFields(path=str(tmp_path / "rows.parquet"))
    pq.write_table(pa.Table.from_pylist(ROWS), parquet.path, row_group_size=2)
    assert read(parquet) == expected(ROWS)
    assert [row.where for row in read_rows(parquet)] == [f"{parquet.path}, row {i}" for i in (1, 2, 3)]


def test_a_directory_of_files_is_a_data_set(tmp_path: Path) -> None:
    directory = tmp_path / "set"
    directory.mkdir()
    jsonl(directory, ROWS[:2], "train.jsonl")
    jsonl(directory, ROWS[2:], "test.jsonl")
    assert read(SourceFields(path=str(directory), split="train")) == expected(ROWS[:2])
    assert read(SourceFields(path=str(directory), split="train+test")) == expected(ROWS)
    (row,) = read_rows(SourceFields(path=str(directory), split="test"))
    assert row.where == f"{directory}, test, row 1"
    with pytest.raises(ValueError, match="has the splits train, test: name one"):
        list(read_rows(SourceFields(path=str(directory))))
    with pytest.raises(ValueError, match=r'Unknown split "valid"'):
        list(read_rows(SourceFields(path=str(directory), split="valid")))
    (directory / "test.jsonl").unlink()
    assert read(SourceFields(path=str(directory))) == expected(ROWS[:2]), "the only split need not be named"


def test_a_data_set_saved_to_disk(tmp_path: Path) -> None:
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=whole.select([0, 1]), test=whole.select([2])).save_to_disk(tmp_path / "split")
    assert read(SourceFields(path=str(tmp_path / "one"))) == expected(ROWS)
    assert read(SourceFields(path=str(tmp_path / "split"), split="train")) == expected(ROWS[:2])
    with pytest.raises(ValueError, match="no split 'valid'; there are train, test"):
        list(read_rows(SourceFields(path=str(tmp_path / "split"), split="valid")))
    with pytest.raises(ValueError, match="no subset 'main'"):
        list(read_rows(SourceFields(path=str(tmp_path / "one"), subset="main")))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"path": "rows.jsonl", "split": "train"}, "subset and split are for Hugging Face data sets"),
        ({"path": "rows.json"}, r"ends in \.jsonl or \.parquet"),
        ({"path": "broken.parquet"}, "cannot be read as Parquet"),
        ({"path": "nothing/here"}, "there is no such directory"),
    ],
)
def test_unreadable_sources_are_refused(tmp_path: Path, source: dict[str, str], message: str) -> None:
    for name in ("rows.json", "rows.jsonl", "broken.parquet"):
        (tmp_path / name).write_text("{}\n")
    with pytest.raises(ValueError, match=message):
        list(read_rows(SourceFields(**{**source, "path": str(tmp_path / source["path"])})))


def test_missing_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nobody/nothing cannot be loaded as a Hugging Face data set"):
        list(read_rows(SourceFields(path="nobody/nothing")))
    with pytest.raises(OSError, match=r"missing\.jsonl"):
        list(read_rows(SourceFields(path=str(tmp_path / "missing.jsonl"))))


def value_of(row: Row, columns: dict[str, Any]) -> int:
    """A parser: broken where it is not a number, too long where it is above 99, empty where it is negative."""
    value = columns["value"]
    if not isinstance(value, int):
        raise ValueError(f"value is {value!r}")
    if value > 99:
        raise UnusableRowError("too_long", f"{value} is too long")
    if value < 0:
        raise UnusableRowError("empty", "it is empty")
    return value


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON: Expecting property name enclosed in double quotes, column 2"),
        ("", "not JSON: Expecting value, column 1"),
        ("[1]", "a row must be a JSON object"),
        ('{"value": "x"}', "value is 'x'"),
    ],
)
def test_one_broken_row_is_named(tmp_path: Path, line: str, reason: str) -> None:
    source = jsonl(tmp_path, [{"value": 1}, line, {"value": 2}])
    with pytest.raises(ValueError) as error:  # noqa: PT011  (the whole text is compared)
        parse_rows(source, value_of)
    assert str(error.value) == f"{source.path}, line 2: {reason}"


def test_bytes_that_are_not_utf8_are_reported(tmp_path: Path) -> None:
    source = jsonl(tmp_path, [{"value": 1}])
    with Path(source.path).open("ab") as file:
        file.write(b'{"value": "\xff"}\n')
    with pytest.raises(ValueError, match=r"line 2: .*can't decode byte 0xff"):
        parse_rows(source, value_of)


def test_the_first_reasons_are_named_with_their_rows_and_the_others_counted(tmp_path: Path) -> None:
    source = jsonl(tmp_path, [{"value": f"x{i // 2}"} if i % 3 else {"value": 1} for i in range(60)])
    with pytest.raises(ValueError, match="40 of 60 rows are broken") as error:
        parse_rows(source, value_of)
    lines = [line.strip() for line in str(error.value).splitlines()[1:]]
    assert lines[0] == f"{source.path}, line 2: value is 'x0'"
    assert lines[2] == f"{source.path}, line 5 (and 1 more): value is 'x2'"
    assert (len(lines), lines[-1]) == (11, "and 20 more reasons")


def test_unusable_rows_are_skipped_by_rule(tmp_path: Path) -> None:
    source = jsonl(tmp_path, [{"value": v} for v in (1, -1, 2, 100, -3)])
    found = parse_rows(source, value_of, {"empty", "too_long"})
    assert found.items == [1, 2]
    assert found.left_out == [
        LeftOut(where=f"{source.path}, line 2", fault="empty", reason="it is empty"),
        LeftOut(where=f"{source.path}, line 4", fault="too_long", reason="100 is too long"),
        LeftOut(where=f"{source.path}, line 5", fault="empty", reason="it is empty"),
    ]
    with pytest.raises(ValueError, match=r"line 4: 100 is too long$"):
        parse_rows(source, value_of, {"empty"})
    with pytest.raises(
        ValueError, match=r"3 of 5 rows are broken:\n *.*line 2 \(and 1 more\): it is empty\n *.*line 4"
    ):
        parse_rows(source, value_of)


def test_a_source_without_usable_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none of its 2 rows is of use\n *.*line 1 \(and 1 more\): it is empty"):
        parse_rows(jsonl(tmp_path, [{"value": -1}, {"value": -1}]), value_of, {"empty"})
    with pytest.raises(ValueError, match="none of its 0 rows is of use"):
        parse_rows(jsonl(tmp_path, []), value_of)


def test_columns_may_have_other_names(tmp_path: Path) -> None:
    path = jsonl(tmp_path, [{"question": "q", "value": 1, "prompt": "p", "answer": "a"}]).path

    def columns(**names: str) -> dict[str, Any]:
        (found,) = parse_rows(SourceFields(path=path, columns=names), lambda row, columns: columns).items
        return found

    assert columns() == {"question": "q", "value": 1, "prompt": "p", "answer": "a"}
    assert columns(prompt="question") == {"prompt": "q", "value": 1, "answer": "a"}
    assert columns(prompt="question", question="prompt") == {"prompt": "q", "question": "p", "value": 1, "answer": "a"}
    assert columns(prompt="question", copy="question", answer="value")["copy"] == "q"
    with pytest.raises(
        ValueError, match="line 1: a row must have the column 'text'; its columns are question, value, prompt, answer"
    ):
        columns(prompt="text")
