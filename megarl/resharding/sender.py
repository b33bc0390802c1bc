"""The sending side of a sync: packs boxes of local parameters into messages, two buckets of memory at most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from megarl.resharding.buckets import frames_bytes, pack, seal, split_frames
from megarl.resharding.records import SyncStats
from megarl.resharding.session import Session
from megarl.resharding.transport import Transfer, Transport
from megarl.weights.plans import Message, SenderPlan


class Sender:
    """Sends a rank's part of a plan.

    Args:
        plan: the part.
        params: the local parameters, by the plan's names. The mapping is kept and its tensors are read in every sync:
            changes in place are sent, and whoever replaces a tensor puts the new one into this mapping, or makes a
            new Sender.
        transport: to the other ranks.
        verify: messages carry checksums; the same on all ranks.
        version: the last committed version.
    """

    def __init__(
        self,
        plan: SenderPlan,
        params: Mapping[str, torch.Tensor],
        transport: Transport,
        *,
        verify: bool = True,
        version: int = -1,
    ) -> None:
        self._plan = plan
        self._params = params
        self._transport = transport
        self._verify = verify
        self._session = Session(transport, fingerprint=plan.fingerprint, verify=verify, version=version)

    @property
    def version(self) -> int:
        """The last version that all ranks have committed."""
        return self._session.version

    def send(self, version: int) -> SyncStats:
        """Sends the parameters as they are now; returns when all ranks have committed the version.

        Waits for the other ranks; unblocked by their progress, by an abort or by the timeout.

        Raises:
            SyncError: the sync was aborted.
        """
        with self._session.sync(version, self._validate) as stats:
            self._send(stats)
        return stats

    def _send(self, stats: SyncStats) -> None:
        """Packs a batch into one half of the staging memory while the other half is on its way."""
        batches = list(self._batches())
        sizes = [frames_bytes(batch, verify=self._verify) for batch in batches]
        halves = [torch.empty(max(sizes[i::2], default=0), dtype=torch.uint8) for i in range(2)]
        stats.peak_staging_bytes = sum(half.numel() for half in halves)
        under_way: list[list[Transfer]] = [[], []]
        for i, batch in enumerate(batches):
            self._wait(under_way[i % 2], stats)
            for message, frame in zip(batch, split_frames(halves[i % 2], batch, verify=self._verify), strict=True):
                with stats.stage("pack"):
                    pack(message.copies, self._params, frame)
                if self._verify:
                    with stats.stage("verify"):
                        seal(frame, message, stats.version)
                under_way[i % 2].append(self._transport.send(message.receiver, message.bucket, frame))
                stats.nbytes += message.nbytes
                stats.messages += 1
        for transfers in under_way:
            self._wait(transfers, stats)

    def _wait(self, transfers: list[Transfer], stats: SyncStats) -> None:
        with stats.stage("transfer"):
            for transfer in transfers:
                transfer.wait()
            transfers.clear()

    def _batches(self) -> Iterator[list[Message]]:
        """Consecutive messages whose frames take no more than the largest bucket would, or one message."""
        batch: list[Message] = []
        nbytes = 0
        for message in self._plan.messages:
            size = frames_bytes([message], verify=self._verify)
            if batch and nbytes + size > self._plan.staging_bytes:
                yield batch
                batch, nbytes = [], 0
            batch.append(message)
            nbytes += size
        if batch:
            yield batch

    def _validate(self) -> None:
        """Raises ValueError, listing all of them, for parameters that are not as planned."""
        problems: list[str] = []
        for name, info in self._plan.params.items():
            if name not in self._params:
                problems.append(f"{name} is missing")
            elif tuple(self._params[name].shape) != info.shape:
                problems.append(f"{name} has shape {tuple(self._params[name].shape)}, planned was {info.shape}")
        if problems:
            raise ValueError("; ".join(problems))
