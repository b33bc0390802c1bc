"""The receiving side of a sync: assembles parameters from what arrives, and loads them while the next arrive."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from megarl.resharding.buckets import (
    bucket_buffer_bytes,
    bucket_views,
    frames_bytes,
    is_intact,
    split_frames,
    unpack,
)
from megarl.resharding.records import SyncStats
from megarl.resharding.session import Session
from megarl.resharding.transport import Transfer, Transport
from megarl.weights.plans import Message, ReceiverPlan

Load = Callable[[str, torch.Tensor], None]


class CorruptMessageError(RuntimeError):
    """A message does not have the checksum that it says."""


class Receiver:
    """Receives a rank's part of a plan.

    Takes the memory of two buckets: one arrives, one is loaded. A parameter that is larger than a bucket is assembled
    whole before it is loaded; where there is one, the second bucket's place is as large as the largest such parameter.

    Args:
        plan: the part.
        transport: to the other ranks.
        load: called once per local parameter, in the plan's order, with its name and the whole parameter; the tensor
            is only valid during the call.
        verify: messages carry checksums; the same on all ranks.
        version: the last committed version.
    """

    def __init__(
        self, plan: ReceiverPlan, transport: Transport, load: Load, *, verify: bool = True, version: int = -1
    ) -> None:
        self._plan = plan
        self._transport = transport
        self._load = load
        self._verify = verify
        self._session = Session(transport, fingerprint=plan.fingerprint, verify=verify, version=version)
        self._consistent = True

    @property
    def version(self) -> int:
        """The last version that all ranks have committed."""
        return self._session.version

    @property
    def consistent(self) -> bool:
        """False from the first load of a sync until its commit: after an abort the parameters are a mixture."""
        return self._consistent

    def receive(self, version: int) -> SyncStats:
        """Receives and loads every parameter; returns when all ranks have committed the version.

        Waits for the other ranks; unblocked by their progress, by an abort or by the timeout.

        Raises:
            SyncError: the sync was aborted. If ``consistent`` is false then, the weights must not be used.
        """
        with self._session.sync(version, self._validate) as stats:
            self._receive(stats)
        self._consistent = True
        return stats

    def _receive(self, stats: SyncStats) -> None:
        """Unpacks a bucket's frames, which frees them for the next, and loads what is whole while that arrives."""
        plan = self._plan
        wire = torch.empty(
            max((frames_bytes(messages, verify=self._verify) for messages in plan.messages), default=0),
            dtype=torch.uint8,
        )
        assembled = torch.empty(
            max((bucket_buffer_bytes(bucket, plan.params) for bucket in plan.buckets), default=0), dtype=torch.uint8
        )
        stats.peak_staging_bytes = wire.numel() + assembled.numel()
        transfers = self._post(wire, plan.messages[0]) if plan.messages else []
        views: dict[str, torch.Tensor] = {}
        for i, bucket in enumerate(plan.buckets):
            if not views:
                views = bucket_views(assembled, bucket, plan.params)
                for name in plan.holed.intersection(views):
                    views[name].zero_()
            frames = split_frames(wire, plan.messages[i], verify=self._verify)
            for message, frame, transfer in zip(plan.messages[i], frames, transfers, strict=True):
                self._take(message, frame, transfer, views, stats)
            if i + 1 < len(plan.buckets):
                transfers = self._post(wire, plan.messages[i + 1])
            if bucket.last:
                with stats.stage("write"):
                    for name in bucket.params:
                        self._consistent = False
                        self._load(name, views[name])
                views = {}

    def _post(self, wire: torch.Tensor, messages: Sequence[Message]) -> list[Transfer]:
        frames = split_frames(wire, messages, verify=self._verify)
        return [
            self._transport.receive(message.sender, message.bucket, frame)
            for message, frame in zip(messages, frames, strict=True)
        ]

    def _take(
        self,
        message: Message,
        frame: torch.Tensor,
        transfer: Transfer,
        views: dict[str, torch.Tensor],
        stats: SyncStats,
    ) -> None:
        """Waits for one message and unpacks it."""
        with stats.stage("transfer"):
            transfer.wait()
        if self._verify:
            with stats.stage("verify"):
                intact = is_intact(frame, message, stats.version)
            if not intact:
                raise CorruptMessageError(
                    f"the message from rank {message.sender} for bucket {message.bucket} is corrupt: "
                    + ", ".join(dict.fromkeys(copy.target for copy in message.copies))
                )
        with stats.stage("unpack"):
            unpack(message.copies, frame, views)
        stats.nbytes += message.nbytes
        stats.messages += 1

    def _validate(self) -> None:
        """Raises ValueError unless the plan brings the manifest: each parameter once, in order and whole."""
        plan = self._plan
        if [name for bucket in plan.buckets if bucket.last for name in bucket.params] != list(plan.params):
            raise ValueError("the buckets are not the manifest's parameters in their order")
        arriving: Counter[str] = Counter()
        for copy in (copy for bucket in plan.messages for message in bucket for copy in message.copies):
            arriving[copy.target] += copy.target_box.size
        partial = [
            name
            for name, info in plan.params.items()
            if name not in plan.holed and arriving[name] != math.prod(info.shape)
        ]
        if partial:
            raise ValueError(f"the messages do not bring all of {', '.join(partial)}")
