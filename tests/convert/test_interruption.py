"""Interrupted conversions: no output looks finished, and finished files are not written again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.convert.exporting import export_checkpoint
from megarl.convert.importing import import_checkpoint
from megarl.convert.output import OutputFile, PartialOutput
from megarl.convert.resources import Resources
from megarl.errors import RunError, UsageError
from megarl.weights.hf_files import CheckpointError
from tests.convert.directories import assert_equal, make_directory, read_directory
from tests.convert.killed import FILE_BYTES
from tests.weights import models

CONFIG = models.qwen2_config()


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are written, in order."""
    names: list[str] = []
    write = OutputFile.write

    def noted(file: OutputFile, directory: Path) -> list[int]:
        names.append(Path(file.path).name)
        return write(file, directory)

    monkeypatch.setattr(OutputFile, "write", noted)
    return names


def _kill(kind: str, source: Path, out: Path, files: int) -> None:
    command = [sys.executable, "-m", "tests.convert.killed", kind, str(source), str(out), str(files)]
    done = subprocess.run(command, check=False, capture_output=True, timeout=240)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert not out.exists()


def _contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.process
def test_killed_conversions_continue_to_the_same_bytes(tmp_path: Path, written: list[str]) -> None:
    tensors = make_directory(tmp_path / "hf", CONFIG)
    import_checkpoint(tmp_path / "hf", tmp_path / "whole", max_file_bytes=FILE_BYTES)
    files = written.copy()
    assert len(files) > 8
    written.clear()

    _kill("import", tmp_path / "hf", tmp_path / "ckpt", 5)
    release = tmp_path / ".ckpt.partial/output/release"
    left = sorted(path.name for path in release.iterdir())
    assert left == [".__5_0.distcp.partial", *(f"__{i}_0.distcp" for i in range(5))]
    damaged = release / "__2_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    import_checkpoint(tmp_path / "hf", tmp_path / "ckpt", max_file_bytes=FILE_BYTES)
    assert written == [files[2], *files[5:]]
    assert not (tmp_path / ".ckpt.partial").exists()
    assert _contents(tmp_path / "ckpt") == _contents(tmp_path / "whole")

    written.clear()
    export_checkpoint(tmp_path / "ckpt", tmp_path / "exported", max_file_bytes=FILE_BYTES)
    files = written.copy()
    written.clear()
    _kill("export", tmp_path / "ckpt", tmp_path / "out", 7)
    export_checkpoint(tmp_path / "ckpt", tmp_path / "out", max_file_bytes=FILE_BYTES)
    assert written == files[7:]
    assert _contents(tmp_path / "out") == _contents(tmp_path / "exported")
    assert_equal(read_directory(tmp_path / "out"), tensors)


def _die() -> None:
    """Ends a worker when it starts."""
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.process
def test_a_killed_worker_is_reported(tmp_path: Path) -> None:
    tensors = make_directory(tmp_path / "hf", CONFIG)
    two = Resources(processes=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megarl.convert.resources._start_worker", _die)
        with pytest.raises(RunError, match="a worker process was killed; finished files are kept"):
            import_checkpoint(tmp_path / "hf", tmp_path / "ckpt", resources=two, max_file_bytes=FILE_BYTES)
    import_checkpoint(tmp_path / "hf", tmp_path / "ckpt", resources=two, max_file_bytes=FILE_BYTES)
    export_checkpoint(tmp_path / "ckpt", tmp_path / "out")
    assert_equal(read_directory(tmp_path / "out"), tensors)


def _interrupt(tmp_path: Path, files: int = 3) -> None:
    """An import that ends like after Ctrl-C."""
    write = OutputFile.write
    begun: list[str] = []

    def write_or_stop(file: OutputFile, directory: Path) -> list[int]:
        begun.append(file.path)
        if len(begun) > files:
            raise KeyboardInterrupt
        return write(file, directory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OutputFile, "write", write_or_stop)
        with pytest.raises(KeyboardInterrupt):
            import_checkpoint(tmp_path / "hf", tmp_path / "ckpt", max_file_bytes=FILE_BYTES)
    assert not (tmp_path / "ckpt").exists()


def test_another_input_is_refused(tmp_path: Path) -> None:
    make_directory(tmp_path / "hf", CONFIG)
    _interrupt(tmp_path)
    other = make_directory(tmp_path / "hf2", CONFIG)
    message = (
        r"ckpt\.partial holds an unfinished conversion with other inputs; repeat that one, choose another --out, or"
    )
    with pytest.raises(UsageError, match=message):
        import_checkpoint(tmp_path / "hf2", tmp_path / "ckpt", max_file_bytes=FILE_BYTES)
    (tmp_path / "hf2/model.safetensors").replace(tmp_path / "hf/model.safetensors")  # another time of change
    with pytest.raises(UsageError, match=message):
        import_checkpoint(tmp_path / "hf", tmp_path / "ckpt", max_file_bytes=FILE_BYTES)
    for path in (tmp_path / ".ckpt.partial").rglob("*"):
        if path.is_file():
            path.unlink()
    import_checkpoint(tmp_path / "hf", tmp_path / "ckpt", max_file_bytes=FILE_BYTES)
    export_checkpoint(tmp_path / "ckpt", tmp_path / "out")
    assert_equal(read_directory(tmp_path / "out"), other)


def test_other_settings_are_refused(tmp_path: Path, written: list[str]) -> None:
    make_directory(tmp_path / "hf", CONFIG)
    _interrupt(tmp_path)
    manifest = tmp_path / ".ckpt.partial/manifest.json"
    before = manifest.read_text()
    for settings in ({"dtype": "bfloat16", "max_file_bytes": FILE_BYTES}, {"max_file_bytes": 2 * FILE_BYTES}):
        with pytest.raises(UsageError, match="unfinished conversion with other settings"):
            import_checkpoint(tmp_path / "hf", tmp_path / "ckpt", **settings)
    assert manifest.read_text() == before
    manifest.write_text(json.dumps({"inputs": 1}))
    with pytest.raises(UsageError, match=r"manifest\.json is damaged; remove .*\.ckpt\.partial to begin anew"):
        import_checkpoint(tmp_path / "hf", tmp_path / "ckpt", max_file_bytes=FILE_BYTES)
    assert len(written) == 3


def test_a_conversion_whose_source_changes_is_discarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make_directory(tmp_path / "hf", CONFIG)
    later = make_directory(tmp_path / "later", CONFIG, tensors={name: t + 1 for name, t in tensors.items()})
    write = OutputFile.write

    def write_and_replace(file: OutputFile, directory: Path) -> list[int]:
        ends = write(file, directory)
        if (tmp_path / "later/model.safetensors").exists():
            (tmp_path / "later/model.safetensors").replace(tmp_path / "hf/model.safetensors")
        return ends

    monkeypatch.setattr(OutputFile, "write", write_and_replace)
    with pytest.raises(CheckpointError, match="files that it reads have changed meanwhile; run it again"):
        import_checkpoint(tmp_path / "hf", tmp_path / "ckpt", max_file_bytes=FILE_BYTES)
    assert [path.name for path in tmp_path.glob("*ckpt*")] == []
    import_checkpoint(tmp_path / "hf", tmp_path / "ckpt", max_file_bytes=FILE_BYTES)
    export_checkpoint(tmp_path / "ckpt", tmp_path / "out")
    assert_equal(read_directory(tmp_path / "out"), later)


def test_a_refused_conversion_leaves_no_files(tmp_path: Path) -> None:
    make_directory(tmp_path / "hf", CONFIG, tensors={})
    with pytest.raises(CheckpointError, match=r"missing: model.norm.weight"):
        import_checkpoint(tmp_path / "hf", tmp_path / "missing/parent/ckpt")
    assert not list((tmp_path / "missing/parent").iterdir())


def test_one_process_at_a_time_and_no_file_is_overwritten(tmp_path: Path) -> None:
    make_directory(tmp_path / "hf", CONFIG)
    with PartialOutput(tmp_path / "ckpt"), pytest.raises(UsageError, match="is being written by another process"):
        import_checkpoint(tmp_path / "hf", tmp_path / "ckpt")
    (tmp_path / "ckpt").mkdir()
    with pytest.raises(UsageError, match="ckpt exists; choose another --out, or remove it"):
        import_checkpoint(tmp_path / "hf", tmp_path / "ckpt")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(UsageError, match="link exists; choose another --out, or remove it"):
        import_checkpoint(tmp_path / "hf", tmp_path / "link")
