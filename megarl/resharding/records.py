"""What the ranks of a sync are told, and what they report."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter

from megarl.weights.plans import ReceiverPlan, SenderPlan, TransferPlan


class SyncError(RuntimeError):
    """A sync was aborted, on all ranks with the same message: who, which tensor, why."""


@dataclass(frozen=True, kw_only=True)
class SyncSpec:
    """What a rank needs to take part in a sync.

    Args:
        name: of this connection; never used twice with one store.
        host, port: of the store.
        world_size: ranks that take part: the trainers', then the engines'.
        fingerprint: of the plan.
        staging_bytes: of the plan's largest bucket.
        senders, receivers: the plan's parts, by rank.
        verify: every message carries a checksum.
        timeout_s: how long a rank waits for others before it aborts the sync.
    """

    name: str
    host: str
    port: int
    world_size: int
    fingerprint: str
    staging_bytes: int
    senders: Mapping[int, SenderPlan]
    receivers: Mapping[int, ReceiverPlan]
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
        world_size: int,
        verify: bool = True,
        timeout_s: float = 300.0,
    ) -> SyncSpec:
        """The spec with all parts of a plan."""
        return cls(
            name=name,
            host=host,
            port=port,
            world_size=world_size,
            fingerprint=plan.fingerprint,
            staging_bytes=plan.staging_bytes,
            senders=plan.senders,
            receivers=plan.receivers,
            verify=verify,
            timeout_s=timeout_s,
        )

    def only(self, ranks: Collection[int]) -> SyncSpec:
        """The spec with nothing but these ranks' parts: what is sent to their process."""
        return replace(
            self,
            senders={rank: part for rank, part in self.senders.items() if rank in ranks},
            receivers={rank: part for rank, part in self.receivers.items() if rank in ranks},
        )

    def sender(self, rank: int) -> SenderPlan:
        """A rank's part in sending; an empty one where the plan has another replica send."""
        idle = SenderPlan(
            rank=rank, fingerprint=self.fingerprint, params={}, messages=(), staging_bytes=self.staging_bytes
        )
        return self.senders.get(rank, idle)


@dataclass(kw_only=True)
class SyncStats:
    """What one rank did in one sync.

    Args:
        version: the weights' version.
        nbytes: payload sent or received; checksums are not counted.
        messages: how many.
        peak_staging_bytes: the most memory that buffers took at once.
        seconds: by stage. All: ``agree`` on what comes, ``verify`` (checksums), ``transfer`` (waiting for the others),
            ``commit``; senders ``pack``; receivers ``unpack`` and ``write`` (into the engine's layers).
    """

    version: int
    nbytes: int = 0
    messages: int = 0
    peak_staging_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Adds the time of the block to a stage."""
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start
