"""Frames between process groups: Gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]  (public by its documentation)

from megarl.resharding.buckets import aligned, frames_bytes, named, payload, unpack
from megarl.resharding.transfers.cuda import NcclTransfer, NcclTransport
from megarl.resharding.transfers.gloo import GlooTransfer, GlooTransport
from megarl.resharding.transfers.transfer import Connection, WeightTransfer, Write
from megarl.weights.plan import Message

Transfer = GlooTransfer | NcclTransfer


class Frames(WeightTransfer):
    """Sends batches of frames from two halves of memory in turn.

    A bucket's frames arrive while another is loaded.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        spec = connection.spec
        rank = connection.rank
        sent: Counter[int] = Counter()
        for message in spec.sender(rank).messages:
            if spec.by_network(message):
                sent[message.bucket] += aligned(message.nbytes)
        self._half_bytes = min(max(sent.values(), default=0), aligned(spec.staging_bytes))
        self._halves_used = 2 if sent.total() > self._half_bytes else 1
        self._bucket_bytes: dict[int, int] = {}
        for receiver in spec.owned(rank):
            sizes = map(frames_bytes, spec.recv_buffers[receiver].network_messages)
            self._bucket_bytes[receiver] = max(sizes, default=0)
        self.staging_bytes = self._half_bytes * self._halves_used + sum(self._bucket_bytes.values())
        self._halves: list[torch.Tensor] = []
        self._under_way: list[list[tuple[Message, Transfer]]] = [[], []]
        self._half = 1
        self._bucket = -1
        self._offset = 0
        self._arriving: dict[int, torch.Tensor] = {}
        self._expected: dict[tuple[int, int], tuple[torch.Tensor, Transfer]] = {}

    def connect(self) -> None:
        connection = self.connection
        spec = connection.spec
        rank = connection.rank
        store = PrefixStore("wire", connection.store)
        if connection.device.type == "cpu":
            connection.wire = GlooTransport(store, spec.wire, rank, spec.wire_peers(rank), spec.timeout_s)
        else:
            connection.wire = NcclTransport(
                store,
                spec.wire,
                rank,
                name=f"sync {spec.name}",
                to=spec.network_receivers(rank),
                from_=spec.network_senders(rank),
                device=connection.device,
                timeout_s=spec.timeout_s,
                look=connection.barrier.look_ahead,
            )

    def prepare(self) -> None:
        if self._halves:
            return

        def memory(nbytes: int) -> torch.Tensor:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.connection.device)

        self._halves = [memory(self._half_bytes) for _ in range(self._halves_used)]
        self._arriving = {receiver: memory(nbytes) for receiver, nbytes in self._bucket_bytes.items()}

    def send(self, message: Message, write: Write) -> None:
        wire = self.connection.wire
        assert wire is not None, "connect comes first"
        size = aligned(message.nbytes)
        if message.bucket != self._bucket or self._offset + size > self._half_bytes:
            self._half = (self._half + 1) % self._halves_used
            self._bucket = message.bucket
            self._offset = 0
            self._wait(self._half)
        frame = self._halves[self._half][self._offset : self._offset + message.nbytes]
        self._offset += size
        write(payload(message, frame))
        owner = self.connection.spec.recv_buffers[message.receiver].owner
        transfer = wire.send(owner, message.receiver, frame)
        self._under_way[self._half].append((message, transfer))

    def expect(self, messages: Sequence[Message]) -> None:
        wire = self.connection.wire
        assert wire is not None, "connect comes first"
        memory = self._arriving[messages[0].receiver]
        offset = 0
        for message in messages:
            frame = memory[offset : offset + message.nbytes]
            offset += aligned(message.nbytes)
            transfer = wire.receive(message.sender, message.receiver, frame)
            self._expected[message.sender, message.receiver] = frame, transfer

    def receive(self, message: Message, targets: Sequence[torch.Tensor]) -> None:
        frame, transfer = self._expected.pop((message.sender, message.receiver))
        transfer.wait(f"rank {message.sender} did not deliver {named(message)}")
        unpack(message, frame, targets)

    def finish(self) -> None:
        for half in range(2):
            self._wait(half)
        self._half = 1
        self._bucket = -1

    def release(self) -> None:
        self._halves = []
        self._arriving = {}

    def abort(self) -> None:
        if self.connection.wire is not None:
            self.connection.wire.abort()

    def close(self) -> None:
        assert self.connection.wire is not None, "connect comes first"
        self.connection.wire.close()

    def _wait(self, half: int) -> None:
        for message, transfer in self._under_way[half]:
            transfer.wait(f"rank {message.receiver} does not get {named(message)}")
        self._under_way[half].clear()
