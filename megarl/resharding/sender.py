"""The sender of a sync: writes boxes of local parameters to receive buffers, or packs them into frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import torch

from megarl.resharding.buckets import Checksum, bucket_views, pack, recv_buffer_bytes, recv_views
from megarl.resharding.memory import RecvBuffer, make_recv_buffer
from megarl.resharding.receiver import FrameReceiver
from megarl.resharding.sync_barrier import SyncStats
from megarl.resharding.sync_round import SyncRound
from megarl.resharding.wire import Connection, Credits, FrameSender, MessageReady, Outbox
from megarl.weights.plan import Message


class Sender:
    """Sends a rank's part of a plan.

    Receive buffers that this process can map are written directly; other messages are packed into frames. On CUDA, the
    rank also owns the receive buffer of the engine on its device, and receives the frames for it.

    Args:
        params: local parameters, by the plan's names; every sync reads the mapping.
        version: last committed version.
    """

    def __init__(self, connection: Connection, params: Mapping[str, torch.Tensor], *, version: int = -1) -> None:
        spec = connection.spec
        rank = connection.rank
        self._connection = connection
        self._params = params
        self._plan = spec.sender(rank)
        self._round = SyncRound(connection, version)
        routes: dict[bool, list[Message]] = {True: [], False: []}  # by whether the message goes over the network
        for message in self._plan.messages:
            routes[rank in spec.recv_buffers[message.receiver].via_network].append(message)
        self._frames = FrameSender(connection, routes[True], self._pack)
        self._direct = {b: list(group) for b, group in groupby(routes[False], key=lambda message: message.bucket)}
        self._receivers = sorted({message.receiver for message in routes[False]})
        hosted = [part for receiver, part in spec.receivers.items() if spec.recv_buffers[receiver].owner == rank]
        self._frame_receivers = {part.rank: FrameReceiver(connection, part) for part in hosted}
        self._recv_buffers: dict[int, RecvBuffer] = {}

    @property
    def version(self) -> int:
        """The last version that all ranks have committed."""
        return self._round.version

    def send(self, version: int) -> SyncStats:
        """Sends the current parameters; returns when all ranks have committed the version, or raises SyncError."""
        with self._round.sync(version, self._offer, self._join) as stats:
            self._send(stats)
            self._connection.mapped.end_sync()
        if self._connection.device.type != "cpu":
            self.release()
        return stats

    def release(self) -> None:
        """Frees frames and receive buffers, which on a CPU are kept between syncs."""
        self._frames.release()
        for frames in self._frame_receivers.values():
            frames.release()
        for buffer in self._recv_buffers.values():
            buffer.release()

    def _offer(self) -> None:
        """Checks the parameters, listing all problems, and offers the receive buffer of the engine on this device."""
        problems: list[str] = []
        for name, info in self._plan.params.items():
            if name not in self._params:
                problems.append(f"{name} is missing")
            elif tuple(self._params[name].shape) != info.shape:
                problems.append(f"{name} has shape {tuple(self._params[name].shape)}, planned was {info.shape}")
        if problems:
            raise ValueError("; ".join(problems))
        connection = self._connection
        for receiver in self._frame_receivers:
            if receiver not in self._recv_buffers:
                nbytes = recv_buffer_bytes(connection.spec.recv_buffers[receiver])
                self._recv_buffers[receiver] = make_recv_buffer(nbytes, connection.device)
            self._recv_buffers[receiver].prepare()
            connection.barrier.post(f"recv_buffer/{receiver}", self._recv_buffers[receiver].handle)

    def _join(self) -> None:
        """Maps the receive buffers to which this rank writes."""
        for receiver in self._receivers:
            if receiver not in self._recv_buffers:
                self._connection.mapped.open(receiver, self._connection.barrier.read(f"recv_buffer/{receiver}"))

    def _send(self, stats: SyncStats) -> None:
        """Sends bucket by bucket: frames first, which take time, then direct writes.

        A rank waits only for others' work on earlier buckets and for pending frames, so there is no deadlock.
        """
        outbox = Outbox(self._connection)
        credits = Credits(self._connection)
        self._frames.begin()
        for frames in self._frame_receivers.values():
            frames.begin()
        stats.peak_staging_bytes = (
            self._frames.staging_bytes
            + sum(frames.staging_bytes for frames in self._frame_receivers.values())
            + sum(buffer.memory.numel() for buffer in self._recv_buffers.values())
        )
        for bucket in range(self._num_buckets()):
            self._frames.send(bucket, outbox, stats)
            for message in self._direct.get(bucket, ()):
                with stats.stage("transfer"):
                    credits.wait(message)
                buffer = self._connection.spec.recv_buffers[message.receiver]
                views = bucket_views(self._memory(message.receiver), buffer, bucket)
                ready = self._pack(message, recv_views(message, buffer.buckets[bucket], views), stats)
                self._connection.put[message.receiver] += ready.nbytes
                outbox.notify(message.receiver, message, ready)
            for receiver, frames in self._frame_receivers.items():
                self._pass_on(receiver, frames, bucket, credits, outbox, stats)
        self._frames.drain(stats)
        with stats.stage("transfer"):
            outbox.drain()

    def _pass_on(
        self, receiver: int, frames: FrameReceiver, bucket: int, credits: Credits, outbox: Outbox, stats: SyncStats
    ) -> None:
        """Unpacks frames for the engine on this device, and notifies it."""
        if bucket >= len(frames.messages):
            return
        with stats.stage("transfer"):
            for message in frames.messages[bucket]:
                credits.wait(message)
            for message, ready in frames.receive(bucket, self._memory(receiver), stats):
                outbox.notify(receiver, message, ready)

    def _pack(self, message: Message, targets: Sequence[torch.Tensor], stats: SyncStats) -> MessageReady:
        checksum = Checksum(message, stats) if self._connection.spec.verify else None
        with stats.stage("pack"):
            nbytes = pack(message, self._params, targets, checksum)
        stats.nbytes += nbytes
        stats.messages += 1
        return MessageReady(stats.version, message.bucket, nbytes, checksum.value if checksum else 0)

    def _memory(self, receiver: int) -> torch.Tensor:
        own = self._recv_buffers.get(receiver)
        return self._connection.mapped[receiver] if own is None else own.memory

    def _num_buckets(self) -> int:
        """Returns the number of buckets of the receivers to which this rank sends, or whose memory it owns."""
        ours = [message.bucket for message in self._plan.messages[-1:]]
        return max([-1, *ours, *(len(frames.messages) - 1 for frames in self._frame_receivers.values())]) + 1
