"""The connection of one rank of a sync with the others: control messages and frames."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, field
from itertools import groupby

import torch
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]  (public by its documentation)

from megarl.resharding.buckets import frames_bytes, named, payload, split_frames
from megarl.resharding.memory import PeerMappings
from megarl.resharding.spec import SyncSpec
from megarl.resharding.sync_barrier import CONNECTING, SyncBarrier, SyncStats, open_store
from megarl.resharding.transport import GlooTransport, NcclTransport, PeerError, Transfer, Transport
from megarl.weights.plan import Message


@dataclass(kw_only=True)
class Connection:
    """One rank's end.

    Args:
        device: of parameters, frames and receive buffers.
        control: of control messages, by Gloo on every device, which notices that a rank is gone.
        wire: of frames; None where this rank has none.
        mapped: other processes' receive buffers, by receiver.
        put: payload bytes written into others' memory, by receiver.
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
        """Waits for pending work on the device, before another process reads its result."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def abort(self) -> None:
        """Breaks the connection: every transfer fails at once, here and at the peers."""
        for transport in self._transports():
            transport.abort()
        self.mapped.end_sync()

    def close(self) -> None:
        """Ends the connection; no transfer may be pending."""
        for transport in self._transports():
            transport.close()
        self.mapped.close()

    def _transports(self) -> list[Transport]:
        return [transport for transport in (self.control, self.wire) if transport is not None]


def connect(spec: SyncSpec, rank: int, device: torch.device | str = "cpu") -> Connection:
    """Connects a rank with all others; raises SyncError if one is missing, has another plan, or no network."""
    device = torch.device(device)
    store = open_store(spec.host, spec.port, spec.name)
    barrier = SyncBarrier(store, rank, spec.world_size, spec.timeout_s)
    start, done = CONNECTING
    barrier.meet(start, {"plan": spec.fingerprint, "verify": f"{spec.verify}"})
    barrier.ahead = done
    wire: Transport | None = None
    with ExitStack() as opened:  # until all ranks are connected
        try:
            members = range(spec.world_size)
            peers = spec.peers(rank)
            control = GlooTransport(PrefixStore("control", store), members, rank, peers, spec.timeout_s)
            opened.callback(control.abort)
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
                opened.callback(wire.abort)
        except RuntimeError as error:
            barrier.abort(done, f"could not connect: {error}")
        barrier.meet(done)
        opened.pop_all()
    return Connection(
        spec=spec, rank=rank, device=device, barrier=barrier, control=control, wire=wire, mapped=PeerMappings(device)
    )


@dataclass(frozen=True)
class MessageReady:
    """The control message that a message was delivered; ``checksum`` is 0 without verification."""

    version: int
    bucket: int
    nbytes: int
    checksum: int


class PendingMessage:
    """A message whose MessageReady is pending; ``peer`` sends it: the sender, or the owner that unpacks the frame."""

    def __init__(self, connection: Connection, message: Message, peer: int) -> None:
        self._message = message
        self._numbers = torch.empty(4, dtype=torch.int64)
        self._transfer = connection.control.receive(peer, message.sender, self._numbers)

    def wait(self, version: int) -> MessageReady:
        """Returns the MessageReady; raises PeerError if it does not come or does not match."""
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
    """Control messages that are sent without waiting for their arrival."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._under_way: list[tuple[Transfer, str]] = []

    def notify(self, peer: int, message: Message, ready: MessageReady) -> None:
        """Notifies a rank that a message is ready, after pending work on the device."""
        self._connection.settle()
        self._send(peer, message.sender, torch.tensor(astuple(ready)), named(message))

    def give_credit(self, writer: int, receiver: int, bucket: int) -> None:
        """Allows a rank to write a bucket, after pending work on the device."""
        self._connection.settle()
        self._send(writer, receiver, torch.tensor([bucket]), f"the memory of bucket {bucket}")

    def drain(self) -> None:
        """Waits until all have arrived; raises PeerError if a peer is gone."""
        for transfer, what in self._under_way:
            try:
                transfer.wait()
            except PeerError as error:
                raise PeerError(f"the message about {what} was not received: {error}") from error
        self._under_way.clear()

    def _send(self, peer: int, tag: int, numbers: torch.Tensor, what: str) -> None:
        self._under_way.append((self._connection.control.send(peer, tag, numbers), what))


class Credits:
    """The buckets that this rank may write, by receiver; at first, as many as the receive buffer holds."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._granted: dict[int, int] = defaultdict(int)

    def wait(self, message: Message) -> None:
        """Waits until the previous bucket in a message's memory is loaded; raises PeerError."""
        receiver = message.receiver
        bucket = message.bucket
        while bucket >= max(self._connection.spec.recv_buffers[receiver].depth, self._granted[receiver] + 1):
            number = torch.empty(1, dtype=torch.int64)
            try:
                self._connection.control.receive(receiver, receiver, number).wait()
            except PeerError as error:
                raise PeerError(f"rank {receiver} takes no {named(message)}: {error}") from error
            self._granted[receiver] = int(number)


Pack = Callable[[Message, Sequence[torch.Tensor], SyncStats], MessageReady]
"""Writes a message's elements to targets."""


class FrameSender:
    """Sends messages over the network, in order of their buckets; ``pack`` fills a frame."""

    def __init__(self, connection: Connection, messages: Sequence[Message], pack: Pack) -> None:
        self._connection = connection
        self._pack = pack
        self._batches = {
            bucket: list(_batches(ours, connection.spec.staging_bytes))
            for bucket, ours in groupby(messages, key=lambda message: message.bucket)
        }
        sizes = [frames_bytes(batch) for batches in self._batches.values() for batch in batches]
        self._sizes = [max(sizes[i::2], default=0) for i in range(2)]
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._under_way: list[list[tuple[Message, Transfer]]] = [[], []]
        self._count = 0

    @property
    def staging_bytes(self) -> int:
        """The size of two batches."""
        return sum(self._sizes)

    def begin(self) -> None:
        self._count = 0
        if self._memory.numel() < self.staging_bytes:
            self._memory = torch.empty(self.staging_bytes, dtype=torch.uint8, device=self._connection.device)

    def send(self, bucket: int, outbox: Outbox, stats: SyncStats) -> None:
        """Packs and starts to send the frames of a bucket; waits for the earlier batch if both halves are in use."""
        for batch in self._batches.get(bucket, ()):
            which = self._count % 2
            self._count += 1
            self._wait(which, stats)
            half = self._memory[: self._sizes[0]] if which == 0 else self._memory[self._sizes[0] :]
            for message, frame in zip(batch, split_frames(half, batch), strict=True):
                ready = self._pack(message, payload(message, frame), stats)
                owner = self._connection.spec.recv_buffers[message.receiver].owner
                assert self._connection.wire is not None, "frames go over the wire"
                transfer = self._connection.wire.send(owner, message.receiver, frame)
                self._under_way[which].append((message, transfer))
                outbox.notify(owner, message, ready)

    def drain(self, stats: SyncStats) -> None:
        """Waits until all have arrived; raises PeerError if a peer is gone."""
        for which in range(2):
            self._wait(which, stats)

    def release(self) -> None:
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
    """Groups consecutive messages whose frames fit the limit; a batch has at least one."""
    batch: list[Message] = []
    for message in messages:
        if batch and frames_bytes([*batch, message]) > limit:
            yield batch
            batch = []
        batch.append(message)
    if batch:
        yield batch
