"""A rank's specification of a sync: its parts of the plan, and the route of each message."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megarl.weights.plan import Bucket, ReceiverPlan, SenderPlan, TransferPlan
from megarl.weights.shard_map import TensorInfo
from megarl.weights.topology import Place

Device = Literal["cpu", "cuda"]
TransportName = Literal["auto", "gloo", "shared_memory"]


@dataclass(frozen=True, kw_only=True)
class RecvBufferPlan:
    """The receive buffer of one receiver, laid out as the parameters of a bucket.

    Args:
        owner: the rank that owns the memory: the receiver itself, or the trainer on its device.
        via_network: senders that cannot map the memory; they send frames to the owner, which unpacks them.
        depth: buckets that the buffer holds; one where frames arrive, which have memory of their own.
    """

    owner: int
    via_network: frozenset[int]
    depth: int
    params: Mapping[str, TensorInfo]
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True, kw_only=True)
class SyncSpec:
    """The ranks' specification of a sync; made by ``of``.

    Args:
        name: of this connection; unique per store.
        host, port: of the store.
        world_size: the trainers' ranks, then the engines'.
        staging_bytes: of the plan's largest bucket.
        senders, receivers, recv_buffers: by rank.
        wire: ranks that send or receive frames.
        verify: messages carry checksums.
        timeout_s: of a wait for other ranks.
    """

    name: str
    host: str
    port: int
    world_size: int
    fingerprint: str
    staging_bytes: int
    senders: Mapping[int, SenderPlan]
    receivers: Mapping[int, ReceiverPlan]
    recv_buffers: Mapping[int, RecvBufferPlan]
    wire: tuple[int, ...]
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
        transport: TransportName = "auto",
        verify: bool = True,
        timeout_s: float = 300.0,
    ) -> SyncSpec:
        """Returns the spec with all parts of a plan.

        Args:
            places: by rank, the trainers' first.
            transport: of messages on CPUs. ``auto`` is shared memory within a node and Gloo between nodes, which
                ``shared_memory`` refuses. CUDA allows ``auto`` only.

        Raises:
            ValueError: the transport does not reach, or the places are impossible; all problems are listed.
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
            receivers=plan.receivers,
            recv_buffers=recv_buffers,
            wire=wire_ranks(recv_buffers),
            verify=verify,
            timeout_s=timeout_s,
        )

    def only(self, ranks: Collection[int]) -> SyncSpec:
        """Returns the spec with only these ranks' parts, for their process."""
        senders = {rank: part for rank, part in self.senders.items() if rank in ranks}
        reached = {message.receiver for part in senders.values() for message in part.messages}
        receivers = {r: part for r, part in self.receivers.items() if r in ranks or self.recv_buffers[r].owner in ranks}
        recv_buffers = {r: buffer for r, buffer in self.recv_buffers.items() if r in reached or r in receivers}
        return replace(self, senders=senders, receivers=receivers, recv_buffers=recv_buffers)

    def wire_peers(self, rank: int) -> list[int]:
        """Returns the ranks with which a rank exchanges frames."""
        return sorted({*self.network_receivers(rank), *self.network_senders(rank)})

    def peers(self, rank: int) -> list[int]:
        """Returns the ranks with which a rank exchanges control messages."""
        peers = set(self.wire_peers(rank))
        for message in self.sender(rank).messages:
            if rank not in self.recv_buffers[message.receiver].via_network:
                peers.add(message.receiver)
        for receiver, part in self.receivers.items():
            buffer = self.recv_buffers[receiver]
            if receiver == rank:
                peers.update(buffer.owner if s in buffer.via_network else s for s in senders_of(part))
            elif buffer.owner == rank and buffer.via_network:
                peers.add(receiver)
        return sorted(peers - {rank})

    def network_receivers(self, rank: int) -> set[int]:
        """Returns the owners to which a rank sends frames."""
        recv_buffers = [self.recv_buffers[message.receiver] for message in self.sender(rank).messages]
        return {buffer.owner for buffer in recv_buffers if rank in buffer.via_network}

    def network_senders(self, rank: int) -> set[int]:
        """Returns the ranks that send frames to an owner."""
        return {
            sender for buffer in self.recv_buffers.values() if buffer.owner == rank for sender in buffer.via_network
        }

    def sender(self, rank: int) -> SenderPlan:
        """Returns a rank's sending part; an empty one where another replica sends."""
        return self.senders.get(rank) or SenderPlan(rank=rank, params={}, messages=())


@dataclass(frozen=True, kw_only=True)
class ConnectRequest:
    """The ranks of a sync that a process connects, an engine's by tensor-parallel rank, with their parts of it.

    Args:
        link: a trainer has one connection of each link at a time.
    """

    sync: SyncSpec
    ranks: Sequence[int]
    link: int = 0


def wire_ranks(recv_buffers: Mapping[int, RecvBufferPlan]) -> tuple[int, ...]:
    """Returns the ranks that exchange frames."""
    framed = [buffer for buffer in recv_buffers.values() if buffer.via_network]
    return tuple(sorted({rank for buffer in framed for rank in (buffer.owner, *buffer.via_network)}))


def plan_recv_buffers(
    plan: TransferPlan, places: Sequence[Place], *, device: Device, transport: TransportName
) -> dict[int, RecvBufferPlan]:
    """Decides the route of every message; see ``SyncSpec.of``."""
    problems = _problems(plan, places, device, transport)
    if problems:
        raise ValueError("; ".join(problems))
    trainers = {place.device: rank for rank, place in enumerate(places) if rank not in plan.receivers}
    recv_buffers: dict[int, RecvBufferPlan] = {}
    for rank, part in plan.receivers.items():
        owner = trainers.get(places[rank].device, rank) if device == "cuda" else rank
        shared = device == "cpu" and transport != "gloo"
        framed = frozenset(s for s in senders_of(part) if s != owner and not (shared and _near(places, s, rank)))
        recv_buffers[rank] = RecvBufferPlan(
            owner=owner, via_network=framed, depth=1 if framed else 2, params=part.params, buckets=part.buckets
        )
    return recv_buffers


def _problems(
    plan: TransferPlan, places: Sequence[Place], kind_of_device: Device, transport: TransportName
) -> list[str]:
    problems: list[str] = []
    if kind_of_device == "cuda":
        if transport != "auto":
            problems.append(f"transport {transport} is for CPUs; on CUDA it must be auto")
        for kind, ranks in (("trainers", set(range(len(places))) - set(plan.receivers)), ("engines", plan.receivers)):
            on_device: dict[int | None, list[int]] = {}
            for rank in sorted(ranks):
                on_device.setdefault(places[rank].device, []).append(rank)
            problems += [
                f"ranks {at} of the {kind} are all on device {device}; one is possible"
                for device, at in on_device.items()
                if len(at) > 1 and device is not None
            ]
        unplaced = [rank for rank, place in enumerate(places) if place.device is None]
        if unplaced:
            problems.append(f"ranks {unplaced} have no device, which CUDA needs")
    if transport == "shared_memory":
        problems += [
            f"transport shared_memory does not reach from rank {sender} on node {places[sender].node} to rank {rank} "
            f"on node {places[rank].node}; set it to auto or gloo"
            for rank, part in plan.receivers.items()
            for sender in senders_of(part)
            if not _near(places, sender, rank)
        ]
    return problems


def _near(places: Sequence[Place], one: int, other: int) -> bool:
    return places[one].node == places[other].node


def senders_of(part: ReceiverPlan) -> list[int]:
    return sorted({message.sender for bucket in part.messages for message in bucket})
