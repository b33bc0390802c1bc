"""Killed conversions: no output looks finished, and finished parts are not written again."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.convert.exporting import export_checkpoint
from megarl.convert.importing import import_checkpoint
from megarl.convert.write_task import Staging, WriteTask
from megarl.errors import UsageError
from tests.convert.directories import assert_equal, make_directory, read_directory
from tests.convert.killed import PART_BYTES, RESOURCES
from tests.weights import models

CONFIG = models.qwen2_config()


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the parts that are written, in order."""
    names: list[str] = []
    write = WriteTask.write

    def noted(part: WriteTask, **options: Any) -> Any:
        names.append(part.name)
        return write(part, **options)

    monkeypatch.setattr(WriteTask, "write", noted)
    return names


def _kill(kind: str, source: Path, out: Path, parts: int) -> None:
    command = [sys.executable, "-m", "tests.convert.killed", kind, str(source), str(out), str(parts)]
    done = subprocess.run(command, check=False, capture_output=True, timeout=240)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert not out.exists()


@pytest.mark.process
def test_killed_conversions_continue(tmp_path: Path, written: list[str]) -> None:
    tensors = make_directory(tmp_path / "hf", CONFIG)
    _kill("import", tmp_path / "hf", tmp_path / "ckpt", 5)
    partial = tmp_path / ".ckpt.partial"
    before = {path.name: path.stat().st_mtime_ns for path in (partial / "output/release").glob("*.distcp")}
    assert len(before) == 6  # the last one without a record
    damaged = partial / "output/release/__2_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    import_checkpoint(tmp_path / "hf", tmp_path / "ckpt", resources=RESOURCES, max_task_bytes=PART_BYTES)
    assert not partial.exists()
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "ckpt/release").glob("__?_0.distcp")}
    assert {name for name in before if after[name] == before[name]} == {f"__{i}_0.distcp" for i in (0, 1, 3, 4)}
    assert written[:2] == ["release.__2_0.distcp.0", "release.__5_0.distcp.0"]

    _kill("export", tmp_path / "ckpt", tmp_path / "out", 7)
    written.clear()
    export_checkpoint(tmp_path / "ckpt", tmp_path / "out", resources=RESOURCES, max_task_bytes=PART_BYTES)
    whole = len(written) + 7
    assert_equal(read_directory(tmp_path / "out"), tensors)
    written.clear()
    export_checkpoint(tmp_path / "ckpt", tmp_path / "again", resources=RESOURCES, max_task_bytes=PART_BYTES)
    assert len(written) == whole


def test_another_conversion_starts_over(tmp_path: Path, written: list[str]) -> None:
    make_directory(tmp_path / "hf", CONFIG)
    _interrupted(tmp_path)
    begun = written.copy()
    changed = make_directory(tmp_path / "hf2", {**CONFIG, "rms_norm_eps": 1e-5})
    for name in ("model.safetensors", "config.json"):
        (tmp_path / "hf2" / name).replace(tmp_path / "hf" / name)
    import_checkpoint(tmp_path / "hf", tmp_path / "ckpt", resources=RESOURCES, max_task_bytes=PART_BYTES)
    assert written[len(begun) : 2 * len(begun)] == begun
    export_checkpoint(tmp_path / "ckpt", tmp_path / "out", resources=RESOURCES)
    assert_equal(read_directory(tmp_path / "out"), changed)


def _interrupted(tmp_path: Path) -> None:
    record, count = Staging.record, iter(range(3))

    def interrupt(staging: Staging, done: Any) -> None:
        record(staging, done)
        if next(count, None) is None:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Staging, "record", interrupt)
        with pytest.raises(KeyboardInterrupt):
            import_checkpoint(tmp_path / "hf", tmp_path / "ckpt", resources=RESOURCES, max_task_bytes=PART_BYTES)


def test_one_process_at_a_time_and_no_file_is_overwritten(tmp_path: Path) -> None:
    make_directory(tmp_path / "hf", CONFIG)
    with Staging(tmp_path / "ckpt"), pytest.raises(UsageError, match="is being written by another process"):
        import_checkpoint(tmp_path / "hf", tmp_path / "ckpt", resources=RESOURCES)
    (tmp_path / "ckpt").mkdir()
    with pytest.raises(UsageError, match="ckpt exists; choose another --out, or remove it"):
        import_checkpoint(tmp_path / "hf", tmp_path / "ckpt", resources=RESOURCES)
