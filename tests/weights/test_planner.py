"""The planner's properties, on random shard maps and on random models and layouts."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.models import model_spec
from megarl.types import Layout
from megarl.weights.plan import ReceiverPlan, TransferPlan
from megarl.weights.planner import Holder, plan
from megarl.weights.shard_map import Box, Shard, ShardMap, TensorInfo, transpose
from tests.unit_profile import fewer
from tests.weights.models import execute, held, numbered, qwen2_config

TENSORS = {"a": (6, 4), "b": (5,), "c": (3, 2, 4)}


@st.composite
def tilings(draw: st.DrawFn, box: Box) -> list[Box]:
    """Random cuts of a box into boxes."""
    axis = draw(st.integers(0, len(box.start) - 1))
    if box.shape[axis] < 2 or draw(st.booleans()):
        return [box]
    at = draw(st.integers(box.start[axis] + 1, box.stop[axis] - 1))
    low = Box(box.start, (*box.stop[:axis], at, *box.stop[axis + 1 :]))
    high = Box((*box.start[:axis], at, *box.start[axis + 1 :]), box.stop)
    return draw(tilings(low)) + draw(tilings(high))


@st.composite
def shard_maps(draw: st.DrawFn, regions: list[tuple[str, Box]]) -> ShardMap:
    """Stores each region in a parameter, maybe transposed and below leading axes, cut up and before padding."""
    params, shards, padding = {}, [], []
    for i, (name, region) in enumerate(regions):
        transposed, extra = len(region.start) > 1 and draw(st.booleans()), draw(st.integers(0, 2))
        leading = (1,) * draw(st.integers(0, 2))
        for part in draw(tilings(region)):
            start = [a - b for a, b in zip(part.start, region.start, strict=True)]
            stop = [a - b for a, b in zip(part.stop, region.start, strict=True)]
            if transposed:
                start, stop = transpose(tuple(start)), transpose(tuple(stop))
            box = Box((*(0 for _ in leading), *start), (*leading, *stop))
            shards.append(Shard(param=f"p{i}", box=box, name=name, region=part, transposed=transposed))
        shape = (*leading, *(transpose(region.shape) if transposed else region.shape))
        params[f"p{i}"] = TensorInfo((shape[0] + extra, *shape[1:]), draw(st.sampled_from(["float32", "float16"])))
        if extra:
            box = Box((shape[0], *(0 for _ in shape[1:])), params[f"p{i}"].shape)
            padding.append((f"p{i}", box))
    return ShardMap(params=params, shards=tuple(shards), padding=tuple(padding))


@st.composite
def sides(draw: st.DrawFn) -> tuple[list[Holder], list[Holder]]:
    """Sources that hold everything at least once, and destinations that want any regions."""
    scattered: dict[int, list[tuple[str, Box]]] = defaultdict(list)
    for name, shape in TENSORS.items():
        for box in draw(tilings(Box.whole(shape))):
            for rank in draw(st.sets(st.integers(0, 3), min_size=1)):
                scattered[rank].append((name, box))
        if draw(st.booleans()):
            scattered[4].append((name, Box.whole(shape)))
    nodes = st.integers(0, 1)
    sources = [Holder(rank=r, map=draw(shard_maps(held)), node=draw(nodes)) for r, held in sorted(scattered.items())]
    destinations = []
    for rank in range(3, 3 + draw(st.integers(1, 4))):
        wanted = [(n, draw(st.sampled_from(draw(tilings(Box.whole(s)))))) for n, s in TENSORS.items()]
        destinations.append(Holder(rank=rank, map=draw(shard_maps(wanted)), node=draw(nodes)))
    return sources, destinations


def check(transfer: TransferPlan, sources: list[Holder], destinations: list[Holder], canonical: dict) -> None:
    """Checks that every destination is correct and written once, and that the plan's numbers are exact."""
    results = execute(transfer, {holder.rank: held(holder.map, canonical) for holder in sources})
    for holder in destinations:
        expected = held(holder.map, canonical)
        values, writes = results[holder.rank]
        for name, array in expected.items():
            np.testing.assert_array_equal(values[name], array, err_msg=name)
            np.testing.assert_array_equal(writes[name], array != 0, err_msg=name)
        receiver = transfer.receivers[holder.rank]
        item = {name: {"float32": 4, "float16": 2}[info.dtype] for name, info in holder.map.params.items()}
        assert receiver.nbytes == sum(int((a != 0).sum()) * item[n] for n, a in expected.items())
        assert [name for bucket in receiver.buckets if bucket.last for name in bucket.params] == list(receiver.params)
        params = list(holder.map.params.items())
        first = params.index(next(iter(receiver.params.items())))
        assert list(receiver.params.items()) == params[first:] + params[:first], "load order, begun anywhere"
    received = [m for r in transfer.receivers.values() for bucket in r.messages for m in bucket]
    sent = [m for s in transfer.senders.values() for m in s.messages]
    assert sorted(map(repr, sent)) == sorted(map(repr, received))
    assert all(m.nbytes == sum(copy.nbytes for copy in m.copies) for m in sent)


def check_buckets(receiver: ReceiverPlan, bucket_bytes: int) -> None:
    """Whole parameters fill buckets; one that is larger than a bucket is cut into parts that do not exceed it."""
    item = {name: {"float32": 4, "float16": 2}[info.dtype] for name, info in receiver.params.items()}
    grouped = [bucket for bucket in receiver.buckets if bucket.box is None]
    sizes = [[receiver.params[name].nbytes for name in bucket.params] for bucket in grouped]
    assert [bucket.nbytes for bucket in grouped] == [sum(size) for size in sizes]
    assert all(bucket.last for bucket in grouped)
    for bucket, after in pairwise(receiver.buckets):
        if bucket.box is None:
            assert bucket.nbytes + receiver.params[after.params[0]].nbytes > bucket_bytes, "buckets are full"
    for name, info in receiver.params.items():
        (first, *more) = (i for i, bucket in enumerate(receiver.buckets) if name in bucket.params)
        parts = receiver.buckets[first : first + 1 + len(more)]
        assert more == list(range(first + 1, first + len(parts)))
        assert (info.nbytes > bucket_bytes) == (parts[0].box is not None)
        if info.nbytes > bucket_bytes:
            assert all(part.nbytes <= bucket_bytes for part in parts)
            assert [part.last for part in parts] == [False] * len(more) + [True]
            cells = np.arange(np.prod(info.shape)).reshape(info.shape)
            arrived = [cells[part.box.slices].ravel() for part in parts if part.box]
            np.testing.assert_array_equal(np.concatenate(arrived), cells.ravel(), "parts in row-major order")
            assert [part.nbytes for part in parts] == [len(cell) * item[name] for cell in arrived]


@settings(max_examples=fewer(60), deadline=None)
@given(sides(), st.integers(4, 200))
def test_every_element_is_written_once_on_random_maps(
    holders: tuple[list[Holder], list[Holder]], bucket_bytes: int
) -> None:
    sources, destinations = holders
    transfer = plan(sources, destinations, bucket_bytes)
    check(transfer, sources, destinations, numbered({n: TensorInfo(s, "float32") for n, s in TENSORS.items()}))
    for receiver in transfer.receivers.values():
        check_buckets(receiver, bucket_bytes)
    for sender in transfer.senders.values():
        assert [(m.bucket, m.receiver) for m in sender.messages] == sorted(
            (m.bucket, m.receiver) for m in sender.messages
        )
        for message in sender.messages:
            assert message.nbytes <= transfer.staging_bytes <= bucket_bytes
            sizes = [{"float32": 4, "float16": 2}[copy.dtype] for copy in message.copies]
            assert sizes == sorted(sizes, reverse=True), "copies are aligned to their items"


def test_elements_without_a_source_are_refused_by_name() -> None:
    spec = model_spec(qwen2_config())
    layout = Layout(tp=2, pp=2)
    ranks = [Holder(rank=rank, map=spec.megatron_map(layout, rank)) for rank in range(layout.world_size)]
    destinations = [Holder(rank=9, map=spec.vllm_map(1, 0))]
    with pytest.raises(
        ValueError, match=r"no source holds model\.embed_tokens\.weight\[0:128, 0:24\], which model\.embed"
    ):
        plan(ranks[1:], destinations, 1 << 20)
    with pytest.raises(ValueError, match=r"; and \d+ more tensors$"):
        plan(ranks[3:], destinations, 1 << 20)
    with pytest.raises(ValueError, match="occur more than once"):
        plan([ranks[0], ranks[0]], destinations, 1 << 20)
    with pytest.raises(ValueError, match=r"buckets of 3 bytes do not hold an element of model\.embed_tokens\.weight"):
        plan(ranks, destinations, 3)


def stacked(
    *at: tuple[int, ...], of: tuple[int, ...], rows: tuple[int, ...] = (0, 4), transposed: bool = False
) -> ShardMap:
    """Matrices W0, W1, ... of [4, 3] at these indices of leading axes, cut at some rows; the rest is padding."""
    step = -1 if transposed else 1

    def box(index: tuple[int, ...], start: int, stop: int) -> Box:
        return Box((*index, *(start, 0)[::step]), (*(i + 1 for i in index), *(stop, 3)[::step]))

    shards = [
        Shard(param="p", box=box(index, a, b), name=f"W{n}", region=Box((a, 0), (b, 3)), transposed=transposed)
        for n, index in enumerate(at)
        for a, b in pairwise(rows)
    ]
    padding = [("p", box(index, 0, 4)) for index in np.ndindex(of) if index not in at]
    info = TensorInfo((*of, *(4, 3)[::step]), "float32")
    return ShardMap(params={"p": info}, shards=tuple(shards), padding=tuple(padding))


@pytest.mark.parametrize(
    ("source", "destination", "boxes"),
    [
        pytest.param(
            stacked((2,), of=(3,), rows=(0, 1, 4)),
            stacked((), of=(), rows=(0, 2, 4)),
            [(Box((2, 0, 0), (3, 4, 3)), Box((0, 0), (4, 3)))],
            id="rows, below an axis of one side",
        ),
        pytest.param(
            stacked((0,), (1,), (2,), of=(3,)),
            stacked((1, 0), (1, 1), (1, 2), of=(2, 3)),
            [(Box((0, 0, 0), (3, 4, 3)), Box((1, 0, 0, 0), (2, 3, 4, 3)))],
            id="matrices, along the axis that both sides have",
        ),
        pytest.param(
            stacked((), of=(), rows=(0, 2, 3, 4)),
            stacked((), of=(), rows=(0, 1, 3, 4), transposed=True),
            [(Box((0, 0), (4, 3)), Box((0, 0), (3, 4)))],
            id="rows, which are columns of the other side",
        ),
        pytest.param(
            stacked((0, 0), (0, 1), (0, 2), (0, 3), of=(1, 4)),
            stacked((0,), (1,), (2,), (3,), of=(4,), transposed=True),
            [(Box((0, 0, 0, 0), (1, 4, 4, 3)), Box((0, 0, 0), (4, 3, 4)))],
            id="matrices, which the other side transposes",
        ),
        pytest.param(
            stacked((0,), (1,), of=(2,)),
            stacked((0, 0), (1, 0), of=(2, 1)),
            [
                (Box((0, 0, 0), (1, 4, 3)), Box((0, 0, 0, 0), (1, 1, 4, 3))),
                (Box((1, 0, 0), (2, 4, 3)), Box((1, 0, 0, 0), (2, 1, 4, 3))),
            ],
            id="not along axes that do not correspond",
        ),
    ],
)
def test_adjacent_boxes_become_one_copy_where_they_correspond(
    source: ShardMap, destination: ShardMap, boxes: list[tuple[Box, Box]]
) -> None:
    sources, destinations = [Holder(rank=0, map=source)], [Holder(rank=1, map=destination)]
    transfer = plan(sources, destinations, 1 << 20)
    (message,) = transfer.senders[0].messages
    assert [(copy.source_box, copy.target_box) for copy in message.copies] == boxes
    tensors = dict.fromkeys((shard.name for shard in source.shards), TensorInfo((4, 3), "float32"))
    check(transfer, sources, destinations, numbered(tensors))


def test_tiles_become_one_copy() -> None:
    tiles = [Box((a, b), (a + 2, b + 2)) for a in (0, 2) for b in (0, 2, 4)]
    shards = tuple(Shard(param="p", box=tile, name="W", region=tile) for tile in tiles)
    tiled = ShardMap(params={"p": TensorInfo((4, 6), "float32")}, shards=shards)
    transfer = plan([Holder(rank=0, map=tiled)], [Holder(rank=1, map=tiled)], 1 << 20)
    (message,) = transfer.senders[0].messages
    assert [copy.target_box for copy in message.copies] == [Box((0, 0), (4, 6))]
