"""The plan of a sync, and a rank's specification of it: its parts, and the route of each message."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megarl.garbage_collection import collector_paused
from megarl.models import ModelSpec
from megarl.models.lora import Adapters, adapter_map, engine_adapter_map, engine_maps
from megarl.types import HeadName, Layout
from megarl.weights.plan import Message, ReceiverPlan, SenderPlan, TransferPlan
from megarl.weights.planner import Holder, Place, plan
from megarl.weights.shard_map import ShardMap

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class RecvBufferPlan(ReceiverPlan):
    """What one rank receives, and its receive buffer, laid out as the parameters of a bucket.

    Args:
        owner: rank that owns the memory: the receiver, or the trainer on its device.
        via_network: senders that cannot map the memory, and send frames to the owner.
        depth: number of buckets in the buffer; one where frames arrive, which have other memory.
    """

    owner: int
    via_network: frozenset[int]
    depth: int

    @property
    def network_messages(self) -> list[list[Message]]:
        """The messages that the owner gets over the network, by bucket."""
        return [[message for message in bucket if message.sender in self.via_network] for bucket in self.messages]

    def writer(self, message: Message) -> int:
        """Returns the rank that writes a message to the buffer."""
        return self.owner if message.sender in self.via_network else message.sender


@dataclass(frozen=True, kw_only=True)
class SyncSpec:
    """The ranks' specification of a sync; made by ``of``.

    Args:
        name: unique per store.
        world_size: number of the trainers' ranks and the engines', in this order.
        staging_bytes: size of the plan's largest bucket.
        wire: ranks that send or receive frames.
        transport: the configuration's choice, or the class of the frames' way as module:Class.
        verify: whether messages carry checksums.
        timeout_s: limit of a wait for other ranks.
    """

    name: str
    host: str
    port: int
    world_size: int
    fingerprint: str
    staging_bytes: int
    senders: Mapping[int, SenderPlan]
    recv_buffers: Mapping[int, RecvBufferPlan]
    wire: tuple[int, ...]
    transport: str = "auto"
    verify: bool = True
    timeout_s: float = 300.0

    @classmethod
    def of(
        cls,
        plan: TransferPlan,
        *,
        name: str,
        host: str,
        port: int,
        places: Sequence[Place],
        device: Device = "cpu",
        transport: str = "auto",
        verify: bool = True,
        timeout_s: float = 300.0,
    ) -> SyncSpec:
        """Returns the spec with all parts of a plan.

        Args:
            places: places by rank, the trainers' first.
            transport: way of messages. On CPUs, ``auto`` is shared memory within a node and Gloo
                between nodes, which ``shared_memory`` refuses with ValueError; on CUDA, it is CUDA
                IPC and NCCL. A user's class brings all messages.
        """
        recv_buffers = plan_recv_buffers(plan, places, device=device, transport=transport)
        return cls(
            name=name,
            host=host,
            port=port,
            world_size=len(places),
            fingerprint=plan.fingerprint,
            staging_bytes=plan.staging_bytes,
            senders=plan.senders,
            recv_buffers=recv_buffers,
            wire=wire_ranks(recv_buffers),
            transport=transport,
            verify=verify,
            timeout_s=timeout_s,
        )

    def only(self, ranks: Collection[int]) -> SyncSpec:
        """Returns the spec with only these ranks' parts, for their process."""
        senders = {rank: part for rank, part in self.senders.items() if rank in ranks}
        reached: set[int] = set()
        for part in senders.values():
            reached.update(message.receiver for message in part.messages)
        recv_buffers: dict[int, RecvBufferPlan] = {}
        for receiver, buffer in self.recv_buffers.items():
            if receiver in ranks or buffer.owner in ranks:
                recv_buffers[receiver] = buffer
            elif receiver in reached:
                recv_buffers[receiver] = replace(buffer, messages=())
        return replace(self, senders=senders, recv_buffers=recv_buffers)

    def by_network(self, message: Message) -> bool:
        """Returns whether a message goes in a frame to the owner of its receive buffer."""
        return message.sender in self.recv_buffers[message.receiver].via_network

    def owned(self, rank: int) -> list[int]:
        """Returns the receivers whose buffers a rank owns."""
        return [receiver for receiver, buffer in self.recv_buffers.items() if buffer.owner == rank]

    def written(self, rank: int) -> set[int]:
        """Returns the receivers whose buffers a rank writes in place, or reads as their receiver."""
        written = self.recv_buffers.keys() & {rank}
        for message in self.sender(rank).messages:
            if not self.by_network(message):
                written.add(message.receiver)
        return written

    def wire_peers(self, rank: int) -> list[int]:
        """Returns the ranks with which a rank exchanges frames."""
        return sorted({*self.network_receivers(rank), *self.network_senders(rank)})

    def peers(self, rank: int) -> list[int]:
        """Returns the ranks with which a rank exchanges control messages."""
        peers = {*self.wire_peers(rank), *self.written(rank)}
        for receiver, buffer in self.recv_buffers.items():
            if receiver == rank:
                for bucket in buffer.messages:
                    peers.update(buffer.writer(message) for message in bucket)
            elif buffer.owner == rank and buffer.via_network:
                peers.add(receiver)
        return sorted(peers - {rank})

    def network_receivers(self, rank: int) -> set[int]:
        """Returns the owners to which a rank sends frames."""
        owners: set[int] = set()
        for message in self.sender(rank).messages:
            if self.by_network(message):
                owners.add(self.recv_buffers[message.receiver].owner)
        return owners

    def network_senders(self, rank: int) -> set[int]:
        """Returns the ranks that send frames to an owner."""
        senders: set[int] = set()
        for buffer in self.recv_buffers.values():
            if buffer.owner == rank:
                senders |= buffer.via_network
        return senders

    def sender(self, rank: int) -> SenderPlan:
        """Returns a rank's sending part; an empty one where another replica sends."""
        return self.senders.get(rank) or SenderPlan(rank=rank, params={}, messages=())


@dataclass(frozen=True, kw_only=True)
class ConnectRequest:
    """The ranks of a sync that a process connects, an engine's by tensor-parallel rank.

    Args:
        link: number of the link; a trainer has one connection of each link at a time.
    """

    sync: SyncSpec
    ranks: Sequence[int]
    link: int = 0


def trainer_holders(
    spec: ModelSpec,
    layout: Layout,
    places: Sequence[Place],
    *,
    head: HeadName = "lm",
    first: int = 0,
    adapters: Adapters | None = None,
) -> list[Holder]:
    """Returns a Megatron role's ranks, from ``first`` on; raises ValueError if the layout does not fit.

    Args:
        adapters: adapters that they hold besides the weights.
    """
    maps: dict[tuple[int, int, int], ShardMap] = {}
    holders: list[Holder] = []
    for rank, place in zip(range(layout.world_size), places, strict=True):
        coords = layout.coords(rank)
        part = coords.tp, coords.pp, layout.expert_rank(coords)
        if part not in maps:
            maps[part] = spec.megatron_map(layout, rank, head)
            if adapters is not None:
                maps[part] = maps[part].joined(adapter_map(spec, adapters, layout, rank))
        holders.append(Holder(rank=first + rank, map=maps[part], node=place.node, device=place.device))
    return holders


def engine_holders(
    spec: ModelSpec,
    tp: int,
    places: Sequence[Place],
    *,
    first: int = 0,
    adapters: Adapters | None = None,
    adapters_only: bool = False,
) -> list[Holder]:
    """Returns vLLM engines' ranks, one by one, from ``first`` on; raises ValueError if TP does not fit.

    Args:
        adapters: adapters that they hold besides the weights.
        adapters_only: whether they have the weights, and need the adapters alone.
    """
    maps = engine_maps(spec, tp, adapters)
    if adapters_only:
        assert adapters is not None
        maps = [engine_adapter_map(spec, adapters, tp, rank) for rank in range(tp)]
    holders: list[Holder] = []
    for index, place in enumerate(places):
        holder = Holder(rank=first + index, map=maps[index % tp], node=place.node, device=place.device)
        holders.append(holder)
    return holders


@collector_paused()
def plan_sync(
    spec: ModelSpec,
    layout: Layout,
    trainers: Sequence[Place],
    tp: int,
    engines: Sequence[Place],
    bucket_bytes: int,
    adapters: Adapters | None = None,
    *,
    adapters_only: bool = False,
) -> TransferPlan:
    """Plans the transfer of a trainer's weights to engines; the trainer's ranks are the first.

    Raises ValueError, with every reason, if the layout or the engines' TP does not fit the model.

    Args:
        adapters: adapters that are sent besides the weights, or with ``adapters_only`` alone.
    """
    sources = trainer_holders(spec, layout, trainers, adapters=adapters)
    destinations = engine_holders(
        spec,
        tp,
        engines,
        first=layout.world_size,
        adapters=adapters,
        adapters_only=adapters_only,
    )
    return plan(sources, destinations, bucket_bytes)


def wire_ranks(recv_buffers: Mapping[int, RecvBufferPlan]) -> tuple[int, ...]:
    """Returns the ranks that exchange frames."""
    ranks: set[int] = set()
    for buffer in recv_buffers.values():
        if buffer.via_network:
            ranks |= {buffer.owner, *buffer.via_network}
    return tuple(sorted(ranks))


def plan_recv_buffers(
    plan: TransferPlan, places: Sequence[Place], *, device: Device, transport: str
) -> dict[int, RecvBufferPlan]:
    """Decides the route of every message; see ``SyncSpec.of``."""
    trainers = {place.device: rank for rank, place in enumerate(places) if rank not in plan.receivers}
    shared = device == "cpu" and transport in ("auto", "shared_memory")
    recv_buffers: dict[int, RecvBufferPlan] = {}
    for rank, part in plan.receivers.items():
        owner = rank
        if device == "cuda" and transport == "auto":
            owner = trainers.get(places[rank].device, rank)
        framed = part.senders - {owner}
        if shared:
            framed = {sender for sender in framed if places[sender].node != places[rank].node}
        if framed and transport == "shared_memory":
            raise ValueError(f"transport shared_memory does not reach from ranks {sorted(framed)} to rank {rank}")
        depth = 1 if framed else 2
        recv_buffers[rank] = RecvBufferPlan(**vars(part), owner=owner, via_network=frozenset(framed), depth=depth)
    return recv_buffers
