"""Takes the frames that come for one receiver, and unpacks them to where it looks for them."""

from __future__ import annotations

import torch

from megarl.resharding.buckets import bucket_views, frames_bytes, landed, named, split_frames, unpack
from megarl.resharding.connection import Connection
from megarl.resharding.notices import Awaited, Notice
from megarl.resharding.records import SyncStats
from megarl.resharding.transport import PeerError, Transfer
from megarl.weights.plans import Message, ReceiverPlan


class Port:
    """The frames of one receiver; those of a bucket arrive while an earlier one is loaded.

    Args:
        connection: of this rank: the receiver, or the trainer on its device.
        plan: of the receiver.
    """

    def __init__(self, connection: Connection, plan: ReceiverPlan) -> None:
        self._connection, self._plan = connection, plan
        self._landing = connection.spec.landings[plan.rank]
        framed = self._landing.framed
        self.messages = [[message for message in bucket if message.sender in framed] for bucket in plan.messages]
        self._wire = torch.empty(0, dtype=torch.uint8)
        self._arriving: list[tuple[Message, torch.Tensor, Transfer, Awaited]] = []

    @property
    def staging_bytes(self) -> int:
        """Memory for the frames of a bucket."""
        return max(map(frames_bytes, self.messages), default=0)

    def begin(self) -> None:
        """Starts to receive the first bucket."""
        if self._wire.numel() < self.staging_bytes:
            self._wire = torch.empty(self.staging_bytes, dtype=torch.uint8, device=self._connection.device)
        self._receive(0)

    def land(self, bucket: int, memory: torch.Tensor, stats: SyncStats) -> list[tuple[Message, Notice]]:
        """Waits for the frames of a bucket, unpacks them, and starts to receive the next ones.

        Args:
            bucket: its index.
            memory: free for it.

        Returns:
            What its senders say of each.
        """
        came: list[tuple[Message, Notice]] = []
        views = bucket_views(memory, self._landing, bucket)
        for message, frame, transfer, awaited in self._arriving:
            try:
                transfer.wait()
            except PeerError as error:
                raise PeerError(f"rank {message.sender} did not deliver {named(message)}: {error}") from error
            came.append((message, awaited.wait(stats.version)))
            unpack(message, frame, landed(message, self._plan.buckets[bucket], views))
        self._receive(bucket + 1)
        return came

    def release(self) -> None:
        """Gives the memory of the frames back."""
        self._wire = torch.empty(0, dtype=torch.uint8)

    def _receive(self, bucket: int) -> None:
        messages = self.messages[bucket] if bucket < len(self.messages) else []
        wire = self._connection.wire
        self._arriving = []
        for message, frame in zip(messages, split_frames(self._wire, messages), strict=True):
            assert wire is not None, "frames come over the wire"
            transfer = wire.receive(message.sender, message.receiver, frame)
            self._arriving.append((message, frame, transfer, Awaited(self._connection, message, message.sender)))
