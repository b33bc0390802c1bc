"""Random small plans between ranks in threads: exact contents by every transport, against numpy."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.resharding import Receiver, Sender, SyncSpec, connect
from megarl.resharding.spec import wire_ranks
from megarl.weights.planner import Holder, Place, plan
from megarl.weights.shard_map import Box, Shard, ShardMap, TensorInfo
from tests.resharding.ways import Connections
from tests.unit_profile import fewer
from tests.weights.models import Arrays, held, numbered

CONNECTIONS = Connections()


@dataclass(frozen=True, kw_only=True)
class Case:
    """Who holds what, and how it is moved."""

    tensors: Mapping[str, TensorInfo]
    sources: list[ShardMap]
    destinations: list[ShardMap]
    bucket_bytes: int
    nodes: list[int]
    transport: str
    ported: bool
    verify: bool


@st.composite
def random_maps(draw: st.DrawFn, tensors: Mapping[str, TensorInfo], count: int, *, padding: bool) -> list[ShardMap]:
    """Maps of holders that divide each tensor among them by rows or columns, or all hold the whole."""
    params: list[dict[str, TensorInfo]] = [{} for _ in range(count)]
    shards: list[list[Shard]] = [[] for _ in range(count)]
    padded: list[list[tuple[str, Box]]] = [[] for _ in range(count)]
    for name, info in tensors.items():
        axis = draw(st.integers(0, len(info.shape) - 1))
        split = draw(st.booleans()) and info.shape[axis] >= count
        dtype = draw(st.sampled_from(["float32", "bfloat16"])) if padding else "float32"
        cuts = [info.shape[axis] * i // count for i in range(count + 1)]
        for i in range(count):
            start, stop = [0] * len(info.shape), list(info.shape)
            if split:
                start[axis], stop[axis] = cuts[i], cuts[i + 1]
            region = Box(tuple(start), tuple(stop))
            flip = len(info.shape) == 2 and draw(st.booleans())
            shape = region.shape[::-1] if flip else region.shape
            extra = draw(st.integers(0, 2)) if padding else 0
            local = f"local.{name}"
            params[i][local] = TensorInfo((shape[0] + extra, *shape[1:]), dtype)
            shards[i].append(Shard(param=local, box=Box.whole(shape), name=name, region=region, transposed=flip))
            if extra:
                box = Box((shape[0], *(0 for _ in shape[1:])), (shape[0] + extra, *shape[1:]))
                padded[i].append((local, box))
    return [ShardMap(params=params[i], shards=tuple(shards[i]), padding=tuple(padded[i])) for i in range(count)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shapes = draw(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=2), min_size=1, max_size=6))
    tensors = {f"t{i}": TensorInfo(tuple(shape), "float32") for i, shape in enumerate(shapes)}
    sources = draw(random_maps(tensors, draw(st.integers(1, 3)), padding=False))
    destinations = draw(random_maps(tensors, draw(st.integers(1, 3)), padding=True))
    return Case(
        tensors=tensors,
        sources=sources * draw(st.integers(1, 2)),
        destinations=destinations,
        bucket_bytes=draw(st.sampled_from([4, 24, 60, 10_000])),
        nodes=draw(st.lists(st.integers(0, 1), min_size=9, max_size=9)),
        transport=draw(st.sampled_from(["auto", "gloo"])),
        ported=draw(st.booleans()),
        verify=draw(st.booleans()),
    )


def spec_of(case: Case) -> SyncSpec:
    first = len(case.sources)
    sources = [Holder(rank=i, map=shard, node=case.nodes[i]) for i, shard in enumerate(case.sources)]
    destinations = [Holder(rank=first + i, map=shard, node=0) for i, shard in enumerate(case.destinations)]
    transfers = plan(sources, destinations, case.bucket_bytes)
    places = [Place(node=holder.node) for holder in (*sources, *destinations)]
    spec = CONNECTIONS.spec(transfers, places, transport=case.transport, verify=case.verify, timeout_s=30.0)
    if not case.ported:
        return spec
    recv_buffers = {}
    for i, (receiver, buffer) in enumerate(spec.recv_buffers.items()):
        owner = i % first
        framed = frozenset(transfers.receivers[receiver].senders - {owner})
        recv_buffers[receiver] = replace(buffer, owner=owner, via_network=framed, depth=1 if framed else 2)
    return replace(spec, recv_buffers=recv_buffers, wire=wire_ranks(recv_buffers))


def values(shard: ShardMap, canonical: Arrays) -> dict[str, torch.Tensor]:
    return {
        name: torch.from_numpy(array.astype(np.float32)).to(getattr(torch, shard.params[name].dtype))
        for name, array in held(shard, canonical).items()
    }


def run(rank: int, case: Case, spec: SyncSpec) -> dict[str, torch.Tensor]:
    """Two syncs of a rank, the second with doubled values; returns the loaded parameters."""
    connection = connect(spec.only([rank]), rank)
    try:
        if rank < len(case.sources):
            params = values(case.sources[rank], numbered(case.tensors))
            sender = Sender(connection, params)
            sender.send(0)
            for tensor in params.values():
                tensor.mul_(2)
            sender.send(1)
            return {}
        infos = case.destinations[rank - len(case.sources)].params
        loaded = {name: torch.full(info.shape, -1.0, dtype=getattr(torch, info.dtype)) for name, info in infos.items()}

        def load(params: Mapping[str, torch.Tensor], box: Box | None) -> None:
            for name, tensor in params.items():
                loaded[name][(box or Box.whole(infos[name].shape)).slices] = tensor

        receiver = Receiver(connection, load)
        for version in range(2):
            stats = receiver.receive(version)
            assert stats.peak_staging_bytes <= 2 * (case.bucket_bytes + 16 * (1 + len(case.sources)))
        return loaded
    finally:
        connection.close()


@settings(max_examples=fewer(25))
@given(cases())
def test_every_element_arrives(case: Case) -> None:
    spec = spec_of(case)
    with ThreadPoolExecutor(spec.world_size) as ranks:
        loaded = list(ranks.map(lambda rank: run(rank, case, spec), range(spec.world_size)))
    for shard, got in zip(case.destinations, loaded[len(case.sources) :], strict=True):
        for name, expected in values(shard, numbered(case.tensors)).items():
            torch.testing.assert_close(got[name], expected * 2, rtol=0, atol=0)
