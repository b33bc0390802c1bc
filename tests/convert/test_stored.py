"""Boxes of stored tensors: reads equal numpy's slices, for any strides."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.convert.stored import BoxReader, SavedTensor, StoredTensor, read_torch_file
from megarl.weights.hf_files import CheckpointError
from megarl.weights.plan import Copy
from megarl.weights.shard_map import Box, TensorInfo
from tests.unit_profile import fewer


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    edges = [sorted(draw(st.tuples(st.integers(0, n - 1), st.integers(1, n)))) for n in shape]
    return Box(tuple(a for a, _ in edges), tuple(max(b, a + 1) for a, b in edges))


@settings(max_examples=fewer(50))
@given(st.data())
def test_boxes_of_any_strides(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    order = data.draw(st.permutations(range(len(shape))))
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape).permute(*order)
    path = tmp_path_factory.mktemp("stored") / "values"
    path.write_bytes(b"before" + values.permute(*_inverse(order)).contiguous().numpy().tobytes())
    info = TensorInfo(tuple(values.shape), "float32")
    stored = StoredTensor(path=path, offset=6, info=info, strides=tuple(values.stride()))
    box = data.draw(boxes(tuple(values.shape)))
    target = torch.full(box.shape, -1.0, dtype=data.draw(st.sampled_from([torch.float32, torch.float64])))
    with BoxReader(data.draw(st.sampled_from([1, 8, 40, 1 << 20]))) as reader:
        reader.read(stored, box, target)
    assert torch.equal(target, values[box.slices].to(target.dtype))


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def test_a_transposed_copy_with_leading_axes(tmp_path: Path) -> None:
    values = torch.arange(24.0).view(4, 6)
    (tmp_path / "values").write_bytes(values.numpy().tobytes())
    stored = StoredTensor(path=tmp_path / "values", offset=0, info=TensorInfo((4, 6), "float32"))
    target = torch.zeros(2, 3, 6, 4)
    copy = Copy(
        source="a",
        source_box=Box((1, 0), (3, 6)),
        target="b",
        target_box=Box((1, 2, 0, 1), (2, 3, 6, 3)),
        dtype="float32",
        transposed=True,
    )
    with BoxReader(16) as reader:
        reader.copy(stored, copy, target[copy.target_box.slices])
    assert torch.equal(target[1, 2, :, 1:3], values[1:3].T)
    assert target.count_nonzero() == 12


def test_an_item_may_be_anywhere_in_a_file(tmp_path: Path) -> None:
    values = torch.randn(5, 7).to(torch.bfloat16)
    archive = io.BytesIO()
    torch.save(values[1:4].T, archive)
    nbytes = len(archive.getvalue())
    (tmp_path / "file").write_bytes(b"x" * 11 + archive.getvalue() + b"y" * 5)
    item = SavedTensor(path=tmp_path / "file", offset=11, nbytes=nbytes, info=TensorInfo((1, 7, 3), "bfloat16"))
    target = torch.zeros(1, 7, 3, dtype=torch.bfloat16)
    with BoxReader(1 << 20) as reader:
        reader.read(item.locate(), Box.whole((1, 7, 3)), target)
    assert torch.equal(target[0], values[1:4].T)


def test_items_that_are_not_tensors_are_named(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2), "b": [1, 2.5, "x"], "n": None}, tmp_path / "good.pt")
    held = read_torch_file(tmp_path / "good.pt")
    assert (held["a"].info, held["b"], held["n"]) == (TensorInfo((2,), "float32"), [1, 2.5, "x"], None)
    torch.save({"a": Path("x")}, tmp_path / "bad.pt")
    with pytest.raises(CheckpointError, match=r"bad.pt is refused:\n  it holds a pathlib[.\w]*Path, not tensors alone"):
        read_torch_file(tmp_path / "bad.pt")


def test_damaged_files_are_named(tmp_path: Path) -> None:
    torch.save(torch.zeros(1000), tmp_path / "whole.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:2000])
    with pytest.raises(CheckpointError, match=r"cut.pt is corrupted:\n  no file of torch.save"):
        read_torch_file(tmp_path / "cut.pt")
    with pytest.raises(CheckpointError, match=r"gone.pt cannot be read:\n  No such file"):
        read_torch_file(tmp_path / "gone.pt")
    short = StoredTensor(path=tmp_path / "cut.pt", offset=0, info=TensorInfo((1000,), "float32"))
    with BoxReader(1 << 20) as reader, pytest.raises(CheckpointError, match="it ends 2000 bytes before a tensor does"):
        reader.read(short, Box.whole((1000,)), torch.zeros(1000))
