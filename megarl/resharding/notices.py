"""The small messages of a sync: what has landed, and what may land."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import astuple, dataclass

import torch

from megarl.resharding.buckets import named
from megarl.resharding.connection import Connection
from megarl.resharding.transport import PeerError, Transfer
from megarl.weights.plans import Message


@dataclass(frozen=True)
class Notice:
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


class Awaited:
    """A notice of a message that is on its way.

    Args:
        connection: on which it comes.
        message: that it is about.
        peer: the rank that gives it: the sender, or the port that has unpacked the frame.
    """

    def __init__(self, connection: Connection, message: Message, peer: int) -> None:
        self._message, self._peer = message, peer
        self._numbers = torch.empty(4, dtype=torch.int64)
        self._transfer = connection.control.receive(peer, message.sender, self._numbers)

    def wait(self, version: int) -> Notice:
        """The notice.

        Raises:
            PeerError: it does not come, or is about something else.
        """
        message = self._message
        try:
            self._transfer.wait()
        except PeerError as error:
            raise PeerError(f"rank {message.sender} did not deliver {named(message)}: {error}") from error
        notice = Notice(*self._numbers.tolist())
        said = (notice.version, notice.bucket, notice.nbytes)
        if said != (version, message.bucket, message.nbytes):
            raise PeerError(
                f"rank {message.sender} delivered version {said[0]}, bucket {said[1]}, {said[2]} bytes for "
                f"{named(message)}; planned was version {version}, bucket {message.bucket}, {message.nbytes} bytes"
            )
        return notice


class Outbox:
    """Small messages that need not have arrived when their sender goes on.

    Args:
        connection: on which they go.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._under_way: list[tuple[Transfer, str]] = []

    def notify(self, peer: int, message: Message, notice: Notice) -> None:
        """Tells a rank that a message has landed, when what was started on the device is done."""
        self._connection.settle()
        self._send(peer, message.sender, torch.tensor(astuple(notice)), named(message))

    def grant(self, writer: int, receiver: int, bucket: int) -> None:
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
                raise PeerError(f"no notice was taken of {what}: {error}") from error
        self._under_way.clear()

    def _send(self, peer: int, tag: int, numbers: torch.Tensor, what: str) -> None:
        self._under_way.append((self._connection.control.send(peer, tag, numbers), what))


class Grants:
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
        while bucket >= max(self._connection.spec.landings[receiver].depth, self._granted[receiver] + 1):
            number = torch.empty(1, dtype=torch.int64)
            try:
                self._connection.control.receive(receiver, receiver, number).wait()
            except PeerError as error:
                raise PeerError(f"rank {receiver} takes no {named(message)}: {error}") from error
            self._granted[receiver] = int(number)
