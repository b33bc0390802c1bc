"""Stored tensors: rows of them, and damaged files."""

from __future__ import annotations

import io
import random
import warnings
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megarl.convert.stored import ArchivedTensor, SafeTensor, Stored, copy_values
from megarl.errors import UsageError
from megarl.weights.hf_files import CheckpointError
from megarl.weights.shard_map import TensorInfo

VALUES = torch.randn(7, 5).to(torch.bfloat16)


def _safe(path: Path) -> Stored:
    save_file({"a": VALUES}, path)
    return SafeTensor(path=path, name="a", info=TensorInfo((7, 5), "bfloat16"))


def _archived(path: Path) -> Stored:
    """Within another file, as a view with other strides."""
    archive = io.BytesIO()
    torch.save(VALUES.T.contiguous().T, archive)
    nbytes = len(archive.getvalue())
    path.write_bytes(b"x" * 11 + archive.getvalue() + b"y" * 5)
    return ArchivedTensor(path=path, offset=11, nbytes=nbytes, info=TensorInfo((7, 5), "bfloat16"))


@pytest.mark.parametrize("store", [_safe, _archived])
def test_rows(store: Callable[[Path], Stored], tmp_path: Path) -> None:
    stored = store(tmp_path / "file")
    for first, stop in ((0, 7), (2, 3), (5, 7)):
        assert torch.equal(stored.read_rows(first, stop), VALUES[first:stop])


@pytest.mark.parametrize("store", [_safe, _archived])
def test_damaged_files_are_named(store: Callable[[Path], Stored], tmp_path: Path) -> None:
    stored = store(tmp_path / "file")
    data = (tmp_path / "file").read_bytes()
    (tmp_path / "file").write_bytes(data[:60])
    with pytest.raises(CheckpointError, match=r"file is corrupted:\n  it is damaged"):
        stored.read_rows(0, 7)
    (tmp_path / "file").unlink()
    with pytest.raises(CheckpointError, match=r"file cannot be read:\n  No such file"):
        stored.read_rows(0, 7)


def test_leading_axes_of_1_may_be_missing_and_nothing_else(tmp_path: Path) -> None:
    stored = _archived(tmp_path / "file")
    assert isinstance(stored, ArchivedTensor)

    def read(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        info = TensorInfo(shape, dtype)
        found = ArchivedTensor(path=stored.path, offset=stored.offset, nbytes=stored.nbytes, info=info)
        return found.read_rows(0, shape[0])

    assert torch.equal(read((1, 1, 7, 5), "bfloat16")[0, 0], VALUES)
    for shape, dtype in (((5, 7), "bfloat16"), ((2, 7, 5), "bfloat16"), ((35,), "bfloat16"), ((7, 5), "float16")):
        with pytest.raises(CheckpointError, match=r"file is corrupted:\n  at byte 11 is no TensorInfo"):
            read(shape, dtype)
    with open(stored.path, "wb") as file:
        torch.save(Fraction(1, 3), file)  # a class that no imported library declares safe
    found = ArchivedTensor(path=stored.path, offset=0, nbytes=stored.path.stat().st_size, info=stored.info)
    with pytest.raises(CheckpointError, match=r"file is corrupted:\n  it is damaged at byte 0, or holds more than"):
        found.read_rows(0, 7)


@pytest.mark.parametrize(("dtype", "wider"), [("float16", "bfloat16"), ("bfloat16", "float64")])
def test_a_cast_that_overflows_is_refused_beside_infinite_values(dtype: str, wider: str) -> None:
    values = torch.tensor([torch.inf, 1e300, 1.0], dtype=torch.float64)
    target = torch.zeros(3, dtype=getattr(torch, dtype))
    with pytest.raises(UsageError, match=f"file has values that {dtype} cannot hold; choose --dtype {wider}"):
        copy_values(values, target, Path("a/file"))
    copy_values(values[2:], target[2:], Path("a/file"))
    copy_values(values[:1], target[:1], Path("a/file"))
    assert target.tolist()[::2] == [torch.inf, 1.0]


@pytest.mark.parametrize("store", [_safe, _archived])
def test_any_corrupted_byte_is_reported_as_damage(store: Callable[[Path], Stored], tmp_path: Path) -> None:
    stored = store(tmp_path / "file")
    data = (tmp_path / "file").read_bytes()
    chance = random.Random(0)
    damaged = 0
    warnings.simplefilter("ignore")  # of torch, for other versions of pickle
    for _ in range(300):
        wrong = bytearray(data)
        for _ in range(3):
            wrong[chance.randrange(len(wrong))] = chance.randrange(256)
        (tmp_path / "file").write_bytes(wrong)
        try:
            stored.read_rows(0, 7)
        except CheckpointError as error:
            damaged += "file" in str(error)
    assert damaged > 100
