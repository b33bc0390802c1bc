"""Packing against numpy; checksums."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.resharding.buckets import CHECKSUM_BYTES, is_intact, pack, seal, split_frames, unpack
from megarl.weights.plans import Copy, Message
from megarl.weights.regions import Box


@st.composite
def copies(draw: st.DrawFn) -> list[Copy]:
    made = []
    for dtype in sorted(draw(st.lists(st.sampled_from(["float32", "bfloat16"]), min_size=1, max_size=5)), reverse=True):
        rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 4))
        at, transposed = draw(st.integers(0, 2)), draw(st.booleans())
        box, flipped = Box((at, 1), (at + rows, 1 + columns)), Box((1, at), (1 + columns, at + rows))
        target = flipped if transposed else box
        made.append(
            Copy(source="s", source_box=box, target=dtype, target_box=target, dtype=dtype, transposed=transposed)
        )
    return made


def as_bytes(source: torch.Tensor, copy: Copy) -> bytes:
    rows = source[copy.source_box.slices].tolist()
    rows = list(map(list, zip(*rows, strict=True))) if copy.transposed else rows
    return torch.tensor(rows, dtype=getattr(torch, copy.dtype)).view(torch.uint8).numpy().tobytes()


@settings(deadline=None)
@given(copies(), st.booleans())
def test_packing_moves_boxes(made: list[Copy], verify: bool) -> None:
    source = torch.arange(30, dtype=torch.float32).view(5, 6)
    nbytes = sum(copy.nbytes for copy in made)
    message = Message(sender=0, receiver=1, bucket=0, copies=tuple(made), nbytes=nbytes)
    buffer = torch.full((4096,), 255, dtype=torch.uint8)
    frame, after = split_frames(buffer, [message, message], verify=verify)
    assert frame.numel() == nbytes + (CHECKSUM_BYTES if verify else 0)

    pack(made, {"s": source}, frame)
    assert bool((after == 255).all())
    expected = b"".join(as_bytes(source, copy) for copy in made)
    assert frame[:nbytes].numpy().tobytes() == expected

    targets = {d: torch.zeros(6, 6, dtype=getattr(torch, d)) for d in ("float32", "bfloat16")}
    unpack(made, frame, targets)
    oracle = {name: np.zeros((6, 6), np.float32) for name in targets}
    for copy in made:
        values = source[copy.source_box.slices].numpy()
        oracle[copy.target][copy.target_box.slices] = values.T if copy.transposed else values
    for name, tensor in targets.items():
        np.testing.assert_array_equal(tensor.float().numpy(), oracle[name])


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=40), st.data())
def test_a_checksum_notices_a_changed_byte(payload: bytes, data: st.DataObject) -> None:
    frame = torch.tensor([*payload, 0, 0, 0, 0], dtype=torch.uint8)
    message = Message(sender=0, receiver=1, bucket=2, copies=(), nbytes=len(payload))
    seal(frame, message, 7)
    assert is_intact(frame, message, 7)
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    assert not is_intact(frame, message, 7)


@pytest.mark.parametrize("other", [{"sender": 3}, {"receiver": 3}, {"bucket": 3}, {"version": 3}], ids=str)
def test_a_checksum_notices_a_message_that_is_not_the_one(other: dict[str, int]) -> None:
    frame = torch.tensor([5, 6, 7, 0, 0, 0, 0], dtype=torch.uint8)
    message = Message(sender=0, receiver=1, bucket=2, copies=(), nbytes=3)
    seal(frame, message, 7)
    wrong = dict(other)
    version = wrong.pop("version", 7)
    assert not is_intact(frame, replace(message, **wrong), version)
