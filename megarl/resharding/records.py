"""What the ranks of a sync report: errors and statistics."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from megarl.errors import RunError


class SyncError(RunError):
    """A sync was aborted, on all ranks with the same message: who, which tensor, why."""


@dataclass(kw_only=True)
class SyncStats:
    """What one rank did in one sync.

    Args:
        version: the weights' version.
        nbytes: payload sent or received; what a trainer passes on to the engine on its device is not counted.
        messages: in how many parts.
        peak_staging_bytes: the most memory that the rank's buffers took at once.
        seconds: by stage. All: ``agree`` on what comes, ``verify`` (checksums), ``transfer`` (waiting for the others,
            and unpacking what came as frames), ``commit``; senders ``pack`` (copies out of the parameters, straight to
            the receiver's memory where it can be reached); receivers ``load`` (into the engine's layers).
    """

    version: int
    nbytes: int = 0
    messages: int = 0
    peak_staging_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Adds the time of the block to a stage, less what the block itself adds to others."""
        start, inner = perf_counter(), sum(self.seconds.values())
        try:
            yield
        finally:
            inner = sum(self.seconds.values()) - inner
            self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start - inner
