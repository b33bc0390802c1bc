"""A rank's specification of a sync: its parts of the plan, and the route of each message."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megarl.weights.plan import Bucket, Message, ReceiverPlan, SenderPlan, TransferPlan
from megarl.weights.shard_map import TensorInfo
from megarl.weights.topology import Place

Device = Literal["cpu", "cuda"]


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

    def writer(self, message: Message) -> int:
        """Returns the rank that writes a message to the buffer."""
        return self.owner if message.sender in self.via_network else message.sender


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
        transport: the configuration's choice, or the class of the frames' way as module:Class.
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
            places: by rank, the trainers' first.
            transport: way of messages. On CPUs, ``auto`` is shared memory within a node and Gloo between nodes, which
                ``shared_memory`` refuses; on CUDA, it is CUDA IPC and NCCL, and ``gloo`` and ``shared_memory`` are
                refused. A class of the user brings all messages.

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
            transport=transport,
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

    def owned(self, rank: int) -> list[int]:
        """Returns the receivers whose buffers a rank owns."""
        return [receiver for receiver in self.receivers if self.recv_buffers[receiver].owner == rank]

    def written(self, rank: int) -> set[int]:
        """Returns the receivers whose buffers a rank writes in place, or reads as their receiver."""
        messages = self.sender(rank).messages
        written = {m.receiver for m in messages if rank not in self.recv_buffers[m.receiver].via_network}
        return written | (self.receivers.keys() & {rank})

    def network_messages(self, receiver: int) -> list[list[Message]]:
        """Returns the messages to a receiver that its buffer's owner gets over the network, by bucket."""
        senders = self.recv_buffers[receiver].via_network
        return [[m for m in bucket if m.sender in senders] for bucket in self.receivers[receiver].messages]

    def wire_peers(self, rank: int) -> list[int]:
        """Returns the ranks with which a rank exchanges frames."""
        return sorted({*self.network_receivers(rank), *self.network_senders(rank)})

    def peers(self, rank: int) -> list[int]:
        """Returns the ranks with which a rank exchanges control messages."""
        peers = {*self.wire_peers(rank), *self.written(rank)}
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
    plan: TransferPlan, places: Sequence[Place], *, device: Device, transport: str
) -> dict[int, RecvBufferPlan]:
    """Decides the route of every message; see ``SyncSpec.of``."""
    problems = _problems(plan, places, device, transport)
    if problems:
        raise ValueError("; ".join(problems))
    trainers = {place.device: rank for rank, place in enumerate(places) if rank not in plan.receivers}
    recv_buffers: dict[int, RecvBufferPlan] = {}
    for rank, part in plan.receivers.items():
        owner = trainers.get(places[rank].device, rank) if device == "cuda" and transport == "auto" else rank
        shared = device == "cpu" and transport in ("auto", "shared_memory")
        near = {s for s in senders_of(part) if shared and places[s].node == places[rank].node}
        framed = frozenset(senders_of(part)) - near - {owner}
        recv_buffers[rank] = RecvBufferPlan(
            owner=owner, via_network=framed, depth=1 if framed else 2, params=part.params, buckets=part.buckets
        )
    return recv_buffers


def _problems(plan: TransferPlan, places: Sequence[Place], kind_of_device: Device, transport: str) -> list[str]:
    problems: list[str] = []
    if kind_of_device == "cuda":
        if transport in ("gloo", "shared_memory"):
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
            if places[sender].node != places[rank].node
        ]
    return problems


def senders_of(part: ReceiverPlan) -> list[int]:
    return sorted({message.sender for bucket in part.messages for message in bucket})
