"""Frames between process groups: Gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]  (public by its documentation)

from megarl.resharding.buckets import aligned, frames_bytes, named, payload, unpack
from megarl.resharding.sync_barrier import PeerError
from megarl.resharding.transfers.cuda import NcclTransfer, NcclTransport
from megarl.resharding.transfers.gloo import GlooTransfer, GlooTransport
from megarl.resharding.transfers.transfer import Connection, WeightTransfer, Write
from megarl.weights.plan import Message


class Frames(WeightTransfer):
    """Sends batches of frames from two halves of memory in turn; a bucket's frames arrive while another is loaded."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        spec = connection.spec
        rank = connection.rank
        sent: Counter[int] = Counter()
        for message in spec.sender(rank).messages:
            if rank in spec.recv_buffers[message.receiver].via_network:
                sent[message.bucket] += aligned(message.nbytes)
        self._half_bytes = min(max(sent.values(), default=0), aligned(spec.staging_bytes))
        self._bucket_bytes = {r: max(map(frames_bytes, spec.network_messages(r)), default=0) for r in spec.owned(rank)}
        self._sizes = [self._half_bytes, self._half_bytes if sent.total() > self._half_bytes else 0]
        self.staging_bytes = sum(self._sizes) + sum(self._bucket_bytes.values())
        self._halves: list[torch.Tensor] = []
        self._under_way: list[list[tuple[Message, GlooTransfer | NcclTransfer]]] = [[], []]
        self._half = 1
        self._bucket = -1
        self._offset = 0
        self._arriving: dict[int, torch.Tensor] = {}
        self._expected: dict[tuple[int, int], tuple[torch.Tensor, GlooTransfer | NcclTransfer]] = {}

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
                to=spec.network_receivers(rank),
                from_=spec.network_senders(rank),
                device=connection.device,
                timeout_s=spec.timeout_s,
                look=connection.barrier.look_ahead,
            )

    def prepare(self) -> None:
        if self._halves:
            return
        sizes = (*self._sizes, *self._bucket_bytes.values())
        memory = [torch.empty(nbytes, dtype=torch.uint8, device=self.connection.device) for nbytes in sizes]
        self._halves = memory[:2]
        self._arriving = dict(zip(self._bucket_bytes, memory[2:], strict=True))

    def send(self, message: Message, write: Write) -> int:
        assert self.connection.wire is not None, "connect comes first"
        if message.bucket != self._bucket or self._offset + aligned(message.nbytes) > self._half_bytes:
            self._half = 1 - self._half
            self._bucket = message.bucket
            self._offset = 0
            self._wait(self._half)
        frame = self._halves[self._half][self._offset : self._offset + message.nbytes]
        self._offset += aligned(message.nbytes)
        nbytes = write(payload(message, frame))
        owner = self.connection.spec.recv_buffers[message.receiver].owner
        self._under_way[self._half].append((message, self.connection.wire.send(owner, message.receiver, frame)))
        return nbytes

    def expect(self, messages: Sequence[Message]) -> None:
        assert self.connection.wire is not None, "connect comes first"
        memory = self._arriving[messages[0].receiver]
        offset = 0
        for message in messages:
            frame = memory[offset : offset + message.nbytes]
            offset += aligned(message.nbytes)
            transfer = self.connection.wire.receive(message.sender, message.receiver, frame)
            self._expected[message.sender, message.receiver] = frame, transfer

    def receive(self, message: Message, targets: Sequence[torch.Tensor]) -> None:
        frame, transfer = self._expected.pop((message.sender, message.receiver))
        try:
            transfer.wait()
        except PeerError as error:
            raise PeerError(f"rank {message.sender} did not deliver {named(message)}: {error}") from error
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
            try:
                transfer.wait()
            except PeerError as error:
                raise PeerError(f"rank {message.receiver} does not get {named(message)}: {error}") from error
        self._under_way[half].clear()
