"""Conversions to a full disk: they name file and cause, and continue when there is space."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.convert.directories import assert_equal, make_directory, read_directory
from tests.convert.test_cli import convert
from tests.disk import SmallDisk
from tests.weights import models

NO_SPACE = re.compile(r"(?P<file>/\S+): No space left on device \((.+ needed, )?.+ free\)\n$")


@pytest.mark.process
def test_import_reports_a_full_disk_and_continues_later(tmp_path: Path) -> None:
    tensors = make_directory(tmp_path / "hf", models.llama_config(vocab_size=3001))
    command = ("import", "--hf", tmp_path / "hf", "--out")
    failed: set[str] = set()
    with SmallDisk(tmp_path / "disk", 8) as disk:
        for kib in range(400, 900, 8):
            code, said = convert(*command, disk.path / "ckpt")
            if code == 0:
                break
            match = NO_SPACE.search(said)
            assert code == 1, said
            assert match, said
            assert not (disk.path / "ckpt").exists()
            failed.add(Path(match["file"]).name.strip("."))
            disk.resize(kib)
        assert code == 0
        assert {"ckpt.partial", "metadata"} <= failed
        assert convert("export", "--checkpoint", disk.path / "ckpt", "--out", tmp_path / "out")[0] == 0
    assert_equal(read_directory(tmp_path / "out"), tensors)
