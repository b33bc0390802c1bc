"""Files of JSON lines that another process is writing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.files import read_lines


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Lines of up to 300 bytes, of 60 KB together, so that any block ends within one; the last is being written."""
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"step": step, "x": "ä" * (step % 50)}) + "\n" for step in range(1000)))
    with path.open("a") as lines:
        lines.write('{"step": 1000, "obj')
    return path


@pytest.mark.parametrize("last", [1, 2, 399, 999, 1000, 5000, None])
def test_the_last_lines_equal_those_of_the_whole_file(
    file: Path, last: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for block in (61, 1024, 1 << 16):
        monkeypatch.setattr("megarl.files._BLOCK", block)
        steps = [line["step"] for line in read_lines(file, last)]
        assert steps == list(range(1000))[-(last or 1000) :]


@pytest.mark.parametrize("text", ["", '{"step": 1', "\0\0\0\n", "[1]\n", "7\n", "\n\n", '{"step"\n'])
def test_missing_and_incomplete_objects_are_skipped(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lines.jsonl"
    assert read_lines(path) == read_lines(path, last=1) == []
    path.write_text(text)
    assert read_lines(path) == read_lines(path, last=3) == []
    path.write_text(f'{{"step": 0}}\n{text}')
    assert read_lines(path) == read_lines(path, last=3) == [{"step": 0}]
