"""Staged outputs of interrupted and of refused conversions."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.convert import exporting
from megarl.convert.exporting import export_checkpoint
from megarl.convert.importing import import_checkpoint
from megarl.convert.resources import Resources
from megarl.convert.write_task import WriteTask
from megarl.errors import UsageError
from megarl.weights.hf_files import CheckpointError
from tests.convert.directories import assert_equal, make_directory, read_directory
from tests.weights import models

CONFIG = models.qwen3_config()
RESOURCES = Resources(memory=4 << 30, processes=1)


def test_a_conversion_interrupted_while_allocating_files_starts_over(tmp_path: Path) -> None:
    tensors = make_directory(tmp_path / "hf", CONFIG)
    import_checkpoint(tmp_path / "hf", tmp_path / "ckpt", resources=RESOURCES)
    create = exporting._create

    def interrupted(files: list[exporting.SafetensorsFile], output: Path) -> None:
        create(files[:1], output)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "_create", interrupted)
        with pytest.raises(KeyboardInterrupt):
            export_checkpoint(tmp_path / "ckpt", tmp_path / "out", resources=RESOURCES, max_file_bytes=20_000)
    export_checkpoint(tmp_path / "ckpt", tmp_path / "out", resources=RESOURCES, max_file_bytes=20_000)
    assert_equal(read_directory(tmp_path / "out"), tensors)


def test_a_conversion_whose_source_changes_is_discarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make_directory(tmp_path / "hf", CONFIG)
    later = make_directory(tmp_path / "later", CONFIG, tensors={name: t + 1 for name, t in tensors.items()})
    write = WriteTask.write

    def replaced_after(part: WriteTask, **options: object) -> object:
        record = write(part, **options)  # type: ignore[arg-type]
        if (tmp_path / "later/model.safetensors").exists():
            (tmp_path / "later/model.safetensors").replace(tmp_path / "hf/model.safetensors")
        return record

    monkeypatch.setattr(WriteTask, "write", replaced_after)
    with pytest.raises(CheckpointError, match="files that it reads have changed meanwhile; run it again"):
        import_checkpoint(tmp_path / "hf", tmp_path / "ckpt", resources=RESOURCES, max_task_bytes=4096)
    assert not (tmp_path / "ckpt").exists()
    import_checkpoint(tmp_path / "hf", tmp_path / "ckpt", resources=RESOURCES, max_task_bytes=4096)
    export_checkpoint(tmp_path / "ckpt", tmp_path / "out", resources=RESOURCES)
    assert_equal(read_directory(tmp_path / "out"), later)


def test_a_refused_conversion_leaves_no_files(tmp_path: Path) -> None:
    make_directory(tmp_path / "hf", CONFIG, tensors={})
    with pytest.raises(CheckpointError, match=r"missing: model.norm.weight"):
        import_checkpoint(tmp_path / "hf", tmp_path / "missing/parent/ckpt", resources=RESOURCES)
    assert not list((tmp_path / "missing/parent").iterdir())


def test_a_dangling_link_is_refused_first(tmp_path: Path) -> None:
    make_directory(tmp_path / "hf", CONFIG)
    (tmp_path / "ckpt").symlink_to(tmp_path / "gone")
    with pytest.raises(UsageError, match="ckpt exists; choose another --out, or remove it"):
        import_checkpoint(tmp_path / "hf", tmp_path / "ckpt", resources=RESOURCES)
