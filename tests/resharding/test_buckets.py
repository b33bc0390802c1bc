"""Packing against numpy; where parameters of a bucket lie; checksums."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.resharding import buckets
from megarl.resharding.buckets import (
    Checksum,
    bucket_views,
    pack,
    payload,
    recv_buffer_bytes,
    recv_views,
    row_sums,
    unpack,
)
from megarl.resharding.spec import RecvBufferPlan
from megarl.resharding.sync_barrier import SyncStats
from megarl.weights.plan import Bucket, Copy, Message
from megarl.weights.shard_map import Box, TensorInfo


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "_SLAB_BYTES", 16)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    copies = []
    for dtype in sorted(draw(st.lists(st.sampled_from(["float32", "bfloat16"]), min_size=1, max_size=5)), reverse=True):
        rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 4))
        at, transposed = draw(st.integers(0, 2)), draw(st.booleans())
        box, flipped = Box((at, 1), (at + rows, 1 + columns)), Box((1, at), (1 + columns, at + rows))
        target = flipped if transposed else box
        copies.append(
            Copy(source="s", source_box=box, target=dtype, target_box=target, dtype=dtype, transposed=transposed)
        )
    nbytes = sum(copy.nbytes for copy in copies)
    return Message(sender=0, receiver=1, bucket=0, copies=tuple(copies), nbytes=nbytes)


SOURCE = torch.arange(30, dtype=torch.float32).view(5, 6)
INFOS = {dtype: TensorInfo((6, 6), dtype) for dtype in ("bfloat16", "float32")}
BUFFER = RecvBufferPlan(
    rank=1,
    padded=frozenset(),
    messages=(),
    owner=1,
    via_network=frozenset(),
    depth=2,
    params=INFOS,
    buckets=(Bucket(params=("bfloat16", "float32"), nbytes=36 * 6),) * 2,
)


def as_bytes(copy: Copy) -> bytes:
    rows = SOURCE[copy.source_box.slices].tolist()
    rows = list(map(list, zip(*rows, strict=True))) if copy.transposed else rows
    return torch.tensor(rows, dtype=getattr(torch, copy.dtype)).view(torch.uint8).numpy().tobytes()


def check(message: Message, views: dict[str, torch.Tensor]) -> None:
    oracle = {name: np.zeros((6, 6), np.float32) for name in views}
    for copy in message.copies:
        values = SOURCE[copy.source_box.slices].numpy()
        oracle[copy.target][copy.target_box.slices] = values.T if copy.transposed else values
    for name, tensor in views.items():
        np.testing.assert_array_equal(tensor.float().numpy(), oracle[name])


@given(messages(), st.booleans())
def test_frames_carry_tensor_slices(message: Message, verify: bool) -> None:
    frame = torch.zeros(message.nbytes, dtype=torch.uint8)
    checksum = Checksum(message, SyncStats(version=1)) if verify else None
    pack(message, {"s": SOURCE}, payload(message, frame), checksum)
    assert frame.numpy().tobytes() == b"".join(map(as_bytes, message.copies))
    views = bucket_views(torch.zeros(recv_buffer_bytes(BUFFER), dtype=torch.uint8), BUFFER, 0)
    unpack(message, frame, recv_views(message, BUFFER.buckets[0], views))
    check(message, views)


@given(messages(), st.integers(0, 1))
def test_slices_written_in_place_have_the_checksum_of_a_frame(message: Message, index: int) -> None:
    memory = torch.full((recv_buffer_bytes(BUFFER),), 7, dtype=torch.uint8)
    halves = memory.split(recv_buffer_bytes(BUFFER) // 2)
    halves[index].zero_()
    views = bucket_views(memory, BUFFER, index)
    assert list(views) == ["bfloat16", "float32"]
    targets = recv_views(message, BUFFER.buckets[index], views)
    stats = SyncStats(version=1)
    there, again, framed = (Checksum(message, stats) for _ in range(3))
    pack(message, {"s": SOURCE}, targets, there)
    check(message, views)
    assert bool((halves[1 - index] == 7).all())
    if _disjoint(message):
        for target in targets:
            again.add(target)
        frame = torch.zeros(message.nbytes, dtype=torch.uint8)
        pack(message, {"s": SOURCE}, payload(message, frame), framed)
        assert there.value == again.value == framed.value


def _disjoint(message: Message) -> bool:
    boxes = [(copy.target, copy.target_box) for copy in message.copies]
    return not any(a[0] == b[0] and a[1].intersect(b[1]) for i, a in enumerate(boxes) for b in boxes[i + 1 :])


def checksum_of(message: Message, values: torch.Tensor, version: int = 7) -> int:
    checksum = Checksum(message, SyncStats(version=version))
    checksum.add(values)
    return checksum.value


MESSAGE = Message(sender=0, receiver=1, bucket=2, copies=(), nbytes=0)


@given(st.binary(min_size=1, max_size=40), st.data())
def test_checksum_detects_a_changed_byte(content: bytes, data: st.DataObject) -> None:
    values = torch.tensor(list(content), dtype=torch.uint8)
    before = checksum_of(MESSAGE, values)
    assert checksum_of(MESSAGE, values.clone()) == before
    values[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    assert checksum_of(MESSAGE, values) != before


@pytest.mark.parametrize("other", [{"sender": 3}, {"receiver": 3}, {"bucket": 3}, {"version": 3}], ids=str)
def test_checksum_detects_a_different_message(other: dict[str, int]) -> None:
    values = torch.tensor([5, 6, 7], dtype=torch.uint8)
    wrong = dict(other)
    version = wrong.pop("version", 7)
    assert checksum_of(MESSAGE._replace(**wrong), values, version) != checksum_of(MESSAGE, values)


WORDS = 2 * 1024 + 5


def test_row_sums_equal_those_of_integers() -> None:
    """On whatever bytes content begins."""
    content = torch.randint(256, (4 * WORDS + 6,), dtype=torch.uint8)[3:]
    words = np.frombuffer(content.numpy().tobytes() + b"\0", np.int32).tolist()
    weights = buckets._row_weights(content.device).tolist()
    rows = [words[start : start + 1024] for start in (0, 1024, 2048)]
    sums = [sum(word * weight for word, weight in zip(row, weights, strict=False)) for row in rows]
    assert [value % 2**64 for value in row_sums(content).tolist()] == [value % 2**64 for value in sums]
    assert torch.equal(row_sums(content[:-3]), row_sums(content[:-3].clone()))


def test_weights_of_rows_tell_exchanged_words_apart() -> None:
    weights = buckets._row_weights(torch.device("cpu"))
    assert bool((weights % 2 == 1).all())
    assert len(set((weights % 2**33).tolist())) == 1024


words = st.integers(0, WORDS - 1)


@given(st.integers(0, 3), st.integers(0, 8 * 4 * WORDS - 1), words, words, st.integers(1, 64), st.integers(0, 2**32))
def test_row_sums_detect_changes(kind: int, bit: int, one: int, other: int, count: int, seed: int) -> None:
    """A flipped bit, exchanged words, exchanged blocks, and everything moved on by some words."""
    before = torch.randint(-(2**31), 2**31, (WORDS,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    after = before.clone()
    if kind == 0:
        after.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    elif kind == 1:
        after[one], after[other] = before[other], before[one]
    elif kind == 2:
        (low, high), size = sorted((one, other)), min(count, abs(one - other), WORDS - max(one, other))
        after[low : low + size], after[high : high + size] = before[high : high + size], before[low : low + size]
    else:
        after = before.roll(count)
    same = torch.equal(before, after)
    assert torch.equal(row_sums(before.view(torch.uint8)), row_sums(after.view(torch.uint8))) == same
