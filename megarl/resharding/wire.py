"""What joins one rank of a sync to the others: the connection, its small messages and its frames."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from itertools import groupby

import torch
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]  (public by its documentation)

from megarl.resharding.buckets import frames_bytes, named, payload, split_frames
from megarl.resharding.memory import PeerMappings
from megarl.resharding.spec import SyncSpec
from megarl.resharding.sync_barrier import SyncBarrier, SyncStats, open_store
from megarl.resharding.transport import GlooTransport, NcclTransport, PeerError, Transfer, Transport
from megarl.weights.plan import Message


@dataclass(kw_only=True)
class Connection:
    """One rank's end.

    Args:
        spec: with this rank's parts.
        rank: of how many others.
        device: of parameters, frames and receive buffer.
        barrier: where all meet.
        control: carries small messages: Gloo on every device, so that a rank that is gone is noticed.
        wire: carries frames; None where this rank has none.
        mapped: other processes' receive buffer, by receiver.
        put: payload bytes that this rank has written into others' memory, by receiver.
    """

    spec: SyncSpec
    rank: int
    device: torch.device
    barrier: SyncBarrier
    control: Transport
    wire: Transport | None
    mapped: PeerMappings
    put: Counter[int] = field(default_factory=Counter)

    @property
    def connected(self) -> bool:
        """Whether a sync is possible: not after ``abort`` or ``close``."""
        return self.control.connected

    def settle(self) -> None:
        """Waits until what has been started on the device is done: another process will look at it."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def abort(self) -> None:
        """Breaks the connection, so that every transfer fails, here and at the peers, at once."""
        for transport in self._transports():
            transport.abort()
        self.mapped.rest()

    def close(self) -> None:
        """Ends the connection; nothing may be under way."""
        for transport in self._transports():
            transport.close()
        self.mapped.close()

    def _transports(self) -> list[Transport]:
        return [transport for transport in (self.control, self.wire) if transport is not None]


def connect(spec: SyncSpec, rank: int, device: torch.device | str = "cpu") -> Connection:
    """Joins a rank to the others of a sync; waits for all of them.

    Args:
        spec: with this rank's parts.
        rank: in the sync.
        device: of this process.

    Raises:
        SyncError: some rank did not come, follows another plan, or could not use the network.
    """
    device = torch.device(device)
    store = open_store(spec.host, spec.port, spec.name)
    barrier = SyncBarrier(store, rank, spec.world_size, spec.timeout_s)
    barrier.meet("connect/start", {"plan": spec.fingerprint, "verify": f"{spec.verify}"})
    barrier.ahead = "connect/done"
    wire: Transport | None = None
    try:
        members, peers = range(spec.world_size), spec.peers(rank)
        control = GlooTransport(PrefixStore("control", store), members, rank, peers, spec.timeout_s)
        if rank in spec.wire:
            frames = PrefixStore("wire", store)
            if device.type == "cpu":
                wire = GlooTransport(frames, spec.wire, rank, spec.wire_peers(rank), spec.timeout_s)
            else:
                wire = NcclTransport(
                    frames,
                    spec.wire,
                    rank,
                    to=spec.network_receivers(rank),
                    from_=spec.network_senders(rank),
                    device=device,
                    timeout_s=spec.timeout_s,
                    look=barrier.look_ahead,
                )
    except RuntimeError as error:
        barrier.abort("connect/done", f"could not connect: {error}")
    barrier.meet("connect/done")
    return Connection(
        spec=spec,
        rank=rank,
        device=device,
        barrier=barrier,
        control=control,
        wire=wire,
        mapped=PeerMappings(device),
    )


@dataclass(frozen=True)
class MessageReady:
    """Says that a message is where it was to go.

    Args:
        version, bucket: of the message.
        nbytes: that were written.
        checksum: of them; zero where there are none.
    """

    version: int
    bucket: int
    nbytes: int
    checksum: int


class PendingMessage:
    """A ready of a message that is on its way.

    Args:
        connection: on which it comes.
        message: that it is about.
        peer: the rank that gives it: the sender, or the port that has unpacked the frame.
    """

    def __init__(self, connection: Connection, message: Message, peer: int) -> None:
        self._message, self._peer = message, peer
        self._numbers = torch.empty(4, dtype=torch.int64)
        self._transfer = connection.control.receive(peer, message.sender, self._numbers)

    def wait(self, version: int) -> MessageReady:
        """The ready.

        Raises:
            PeerError: it does not come, or is about something else.
        """
        message = self._message
        try:
            self._transfer.wait()
        except PeerError as error:
            raise PeerError(f"rank {message.sender} did not deliver {named(message)}: {error}") from error
        ready = MessageReady(*self._numbers.tolist())
        said = (ready.version, ready.bucket, ready.nbytes)
        if said != (version, message.bucket, message.nbytes):
            raise PeerError(
                f"rank {message.sender} delivered version {said[0]}, bucket {said[1]}, {said[2]} bytes for "
                f"{named(message)}; planned was version {version}, bucket {message.bucket}, {message.nbytes} bytes"
            )
        return ready


class Outbox:
    """Small messages that need not have arrived when their sender goes on.

    Args:
        connection: on which they go.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._under_way: list[tuple[Transfer, str]] = []

    def notify(self, peer: int, message: Message, ready: MessageReady) -> None:
        """Tells a rank that a message has recv_views, when what was started on the device is done."""
        self._connection.settle()
        self._send(peer, message.sender, torch.tensor(astuple(ready)), named(message))

    def give_credit(self, writer: int, receiver: int, bucket: int) -> None:
        """Lets a rank write a bucket, when what was started on the device is done."""
        self._connection.settle()
        self._send(writer, receiver, torch.tensor([bucket]), f"the memory of bucket {bucket}")

    def drain(self) -> None:
        """Waits until all have arrived.

        Raises:
            PeerError: a peer is gone.
        """
        for transfer, what in self._under_way:
            try:
                transfer.wait()
            except PeerError as error:
                raise PeerError(f"no ready was taken of {what}: {error}") from error
        self._under_way.clear()

    def _send(self, peer: int, tag: int, numbers: torch.Tensor, what: str) -> None:
        self._under_way.append((self._connection.control.send(peer, tag, numbers), what))


class Credits:
    """What this rank may write, by receiver; the first buckets, as many as the memory holds, it always may.

    Args:
        connection: on which the receivers grant more, in order.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._granted: dict[int, int] = defaultdict(int)

    def wait(self, message: Message) -> None:
        """Waits until the memory for a message is free: until the receiver has loaded what was there.

        Raises:
            PeerError: the receiver is gone.
        """
        receiver, bucket = message.receiver, message.bucket
        while bucket >= max(self._connection.spec.recv_buffers[receiver].depth, self._granted[receiver] + 1):
            number = torch.empty(1, dtype=torch.int64)
            try:
                self._connection.control.receive(receiver, receiver, number).wait()
            except PeerError as error:
                raise PeerError(f"rank {receiver} takes no {named(message)}: {error}") from error
            self._granted[receiver] = int(number)


Pack = Callable[[Message, Sequence[torch.Tensor], SyncStats], MessageReady]
"""Writes a message's elements to their places; what there is to say of it."""


class FrameSender:
    """The messages of a rank that go over the wire.

    Args:
        connection: to the other ranks.
        messages: in order of their buckets.
        limit: of a batch, which one half of the memory holds, in bytes; a message may be as large.
        pack: fills a frame.
    """

    def __init__(self, connection: Connection, messages: Sequence[Message], limit: int, pack: Pack) -> None:
        self._connection, self._pack = connection, pack
        self._batches = {
            bucket: list(_batches(ours, limit))
            for bucket, ours in groupby(messages, key=lambda message: message.bucket)
        }
        sizes = [frames_bytes(batch) for batches in self._batches.values() for batch in batches]
        self._sizes = [max(sizes[i::2], default=0) for i in range(2)]
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._under_way: list[list[tuple[Message, Transfer]]] = [[], []]
        self._count = 0

    @property
    def staging_bytes(self) -> int:
        """Memory for two batches."""
        return sum(self._sizes)

    def begin(self) -> None:
        """A sync begins: there must be memory."""
        self._count = 0
        if self._memory.numel() < self.staging_bytes:
            self._memory = torch.empty(self.staging_bytes, dtype=torch.uint8, device=self._connection.device)

    def send(self, bucket: int, outbox: Outbox, stats: SyncStats) -> None:
        """Packs and starts to send the frames of a bucket.

        Waits, where both halves are under way, for the earlier one.
        """
        for batch in self._batches.get(bucket, ()):
            which = self._count % 2
            self._count += 1
            self._wait(which, stats)
            half = self._memory[: self._sizes[0]] if which == 0 else self._memory[self._sizes[0] :]
            for message, frame in zip(batch, split_frames(half, batch), strict=True):
                ready = self._pack(message, payload(message, frame), stats)
                port = self._connection.spec.recv_buffers[message.receiver].owner
                assert self._connection.wire is not None, "frames go over the wire"
                transfer = self._connection.wire.send(port, message.receiver, frame)
                self._under_way[which].append((message, transfer))
                outbox.notify(port, message, ready)

    def drain(self, stats: SyncStats) -> None:
        """Waits until all have arrived.

        Raises:
            PeerError: a peer is gone.
        """
        for which in range(2):
            self._wait(which, stats)

    def release(self) -> None:
        """Gives the memory back."""
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _wait(self, which: int, stats: SyncStats) -> None:
        with stats.stage("transfer"):
            for message, transfer in self._under_way[which]:
                try:
                    transfer.wait()
                except PeerError as error:
                    raise PeerError(f"rank {message.receiver} does not get {named(message)}: {error}") from error
        self._under_way[which].clear()


def _batches(messages: Iterator[Message], limit: int) -> Iterator[list[Message]]:
    """Consecutive messages whose frames take no more than the limit, or one message."""
    batch: list[Message] = []
    for message in messages:
        if batch and frames_bytes([*batch, message]) > limit:
            yield batch
            batch = []
        batch.append(message)
    if batch:
        yield batch
