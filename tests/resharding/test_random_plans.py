"""Random small plans between ranks in threads: exact contents by every transport, against numpy."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.resharding import Receiver, Sender, SyncSpec, connect
from megarl.resharding.spec import wire_ranks
from megarl.weights.planner import Holder, plan
from megarl.weights.shard_map import Box, ShardMap, TensorInfo
from tests.resharding.ways import Connections
from tests.unit_profile import fewer
from tests.weights.models import held, numbered
from tests.weights.test_planner import TENSORS, sides

CONNECTIONS = Connections()


Side = list[Holder]


@st.composite
def random_specs(draw: st.DrawFn) -> tuple[Side, Side, SyncSpec]:
    """Sources and destinations in an order of ranks, and how the weights get from the ones to the others."""
    found, wanted = draw(sides())
    first = len(found)
    sources = [replace(holder, rank=rank) for rank, holder in enumerate(found)]
    destinations = [replace(holder, rank=first + i, node=0) for i, holder in enumerate(wanted)]
    bucket_bytes = draw(st.sampled_from([4, 24, 60, 10_000]))
    spec = CONNECTIONS.spec(
        plan(sources, destinations, bucket_bytes),
        [*sources, *destinations],
        transport=draw(st.sampled_from(["auto", "gloo"])),
        verify=draw(st.booleans()),
        timeout_s=30.0,
    )
    if draw(st.booleans()):
        return sources, destinations, spec
    recv_buffers = {}
    for i, (receiver, buffer) in enumerate(spec.recv_buffers.items()):
        owner = i % first
        framed = frozenset(buffer.senders - {owner})
        recv_buffers[receiver] = replace(buffer, owner=owner, via_network=framed, depth=1 if framed else 2)
    return sources, destinations, replace(spec, recv_buffers=recv_buffers, wire=wire_ranks(recv_buffers))


def values(shard: ShardMap) -> dict[str, torch.Tensor]:
    arrays = held(shard, numbered({name: TensorInfo(shape, "float32") for name, shape in TENSORS.items()}))
    return {
        name: torch.from_numpy(array.astype(np.float32)).to(getattr(torch, shard.params[name].dtype))
        for name, array in arrays.items()
    }


def run(rank: int, sources: Side, destinations: Side, spec: SyncSpec) -> dict[str, torch.Tensor]:
    """Two syncs of a rank, the second with doubled values; returns the loaded parameters."""
    connection = connect(spec.only([rank]), rank)
    try:
        if rank < len(sources):
            params = values(sources[rank].map)
            sender = Sender(connection, params)
            sender.send(0)
            for tensor in params.values():
                tensor.mul_(2)
            sender.send(1)
            return {}
        infos = destinations[rank - len(sources)].map.params
        loaded = {name: torch.full(info.shape, -1.0, dtype=getattr(torch, info.dtype)) for name, info in infos.items()}

        def load(params: Mapping[str, torch.Tensor], box: Box | None) -> None:
            for name, tensor in params.items():
                loaded[name][(box or Box.whole(infos[name].shape)).slices] = tensor

        receiver = Receiver(connection, load)
        for version in range(2):
            stats = receiver.receive(version)
            assert stats.peak_staging_bytes <= 2 * (spec.staging_bytes + 16 * (1 + len(sources)))
        return loaded
    finally:
        connection.close()


@settings(max_examples=fewer(25), deadline=None)
@given(random_specs())
def test_every_element_arrives(case: tuple[Side, Side, SyncSpec]) -> None:
    sources, destinations, spec = case
    with ThreadPoolExecutor(spec.world_size) as ranks:
        loaded = list(ranks.map(lambda rank: run(rank, *case), range(spec.world_size)))
    for holder, got in zip(destinations, loaded[len(sources) :], strict=True):
        for name, expected in values(holder.map).items():
            torch.testing.assert_close(got[name], expected * 2, rtol=0, atol=0)
