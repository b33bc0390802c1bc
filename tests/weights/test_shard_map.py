"""Boxes against boolean masks; refusals of shard maps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.weights.shard_map import Box, Shard, ShardMap, TensorInfo, adjacent_axis, row_major_boxes

SHAPE = (5, 4, 3)


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    spans = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in SHAPE]
    return Box(tuple(a for a, _ in spans), tuple(b for _, b in spans))


def mask(box: Box) -> np.ndarray:
    filled = np.zeros(SHAPE, int)
    filled[box.slices] = 1
    return filled


@settings(deadline=None)
@given(boxes(), boxes())
def test_box_intersection_and_difference_equal_set_operations(a: Box, b: Box) -> None:
    common = a.intersect(b)
    np.testing.assert_array_equal(mask(common) if common else np.zeros(SHAPE), mask(a) * mask(b))
    if common:
        rest = sum((mask(box) for box in a.without(common)), np.zeros(SHAPE, int))
        np.testing.assert_array_equal(rest, mask(a) - mask(common))
    assert a.contains(b) == bool((mask(a) >= mask(b)).all())
    assert a.size == mask(a).sum()


@settings(deadline=None)
@given(boxes(), boxes())
def test_boxes_are_adjacent_where_their_union_is_a_box(a: Box, b: Box) -> None:
    union = mask(a) + mask(b)
    hull = Box(tuple(map(min, a.start, b.start)), tuple(map(max, a.stop, b.stop)))
    follows = all(x <= y for x, y in zip(a.start, b.start, strict=True)) and a != b
    assert (adjacent_axis(a, b) is not None) == (follows and bool((union == mask(hull)).all()))


@settings(deadline=None)
@given(boxes(), st.integers(1, 70))
def test_parts_of_a_box_follow_in_row_major_order(box: Box, size: int) -> None:
    parts = box.split(size)
    cells = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    in_order = np.concatenate([cells[part.slices].ravel() for part in parts])
    np.testing.assert_array_equal(in_order, cells[box.slices].ravel())
    assert max(part.size for part in parts) <= size


@settings(deadline=None)
@given(boxes(), boxes(), st.integers(0, 2), st.booleans())
def test_a_box_within_a_shard_maps_to_its_storage(outer: Box, other: Box, leading: int, transposed: bool) -> None:
    transposed = transposed and leading < 2
    outer = Box(outer.start, (*(a + 1 for a in outer.start[:leading]), *outer.stop[leading:]))
    at = (10, 20, 30)[leading:]
    shape = outer.shape[leading:]
    if transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
    region = Box(at, tuple(a + n for a, n in zip(at, shape, strict=True)))
    shard = Shard(param="w", box=outer, name="W", region=region, transposed=transposed)
    part = shard.within(other)
    canonical = np.arange(60 ** len(at)).reshape((60,) * len(at)) + 1

    def stored(shard: Shard) -> np.ndarray:
        cells, values = np.zeros(SHAPE, int), canonical[shard.region.slices]
        cells[shard.box.slices] = values.swapaxes(-2, -1) if transposed else values
        return cells

    expected = stored(shard) * mask(other)
    assert (part is not None) == bool(expected.any())
    if part:
        np.testing.assert_array_equal(stored(part), expected)
        assert shard.local(part.region) == part.box


def shard(start: int, stop: int, *, param: str = "w", region: Box | None = None) -> Shard:
    box = Box((start, 0), (stop, 2))
    return Shard(param=param, box=box, name="W", region=region or box)


@pytest.mark.parametrize(
    ("shards", "padding", "message"),
    [
        ([shard(0, 3)], [], "do not tile"),
        ([shard(0, 3), shard(2, 4)], [], "do not tile"),
        ([shard(0, 3), shard(3, 5)], [], "do not tile"),
        ([shard(0, 4), shard(0, 4, param="v")], [], "v is not among"),
        ([shard(0, 4, region=Box((0, 0), (2, 4)))], [], "differ in extents"),
        ([shard(0, 4, region=Box((0,), (2,)))], [], "differ in extents"),
        ([shard(0, 4, region=Box((0, 0, 0), (1, 4, 2)))], [], "differ in extents"),
        ([shard(0, 3)], [("w", Box((2, 0), (4, 2)))], "do not tile"),
    ],
)
def test_a_shard_map_refuses_what_does_not_tile_its_parameters(
    shards: list[Shard], padding: list[tuple[str, Box]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ShardMap(params={"w": TensorInfo((4, 2), "float32")}, shards=tuple(shards), padding=tuple(padding))


def test_fingerprints_are_of_contents() -> None:
    def make(dtype: str) -> ShardMap:
        return ShardMap(params={"w": TensorInfo((4, 2), dtype)}, shards=(shard(0, 4),))

    assert make("float32").fingerprint == make("float32").fingerprint
    assert make("float32").fingerprint != make("bfloat16").fingerprint


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_boxes_of_a_contiguous_run_cover_it_in_order(shape: list[int], data: st.DataObject) -> None:
    size = int(np.prod(shape))
    start, stop = sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=2)))
    cells = np.arange(size).reshape(shape)
    found = [cells[box.slices].ravel() for box in row_major_boxes(tuple(shape), start, stop)]
    assert np.concatenate([np.zeros(0, int), *found]).tolist() == list(range(start, stop))
    assert len(found) <= 2 * len(shape) - 1
