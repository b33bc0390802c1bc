"""The protocol of a sync, shared by senders and receivers: agree, transfer, commit, or abort everywhere."""

from __future__ import annotations

from collections.abc import Callable

from megarl.resharding.sync_barrier import SyncError, SyncStats, sync_places
from megarl.resharding.transfers.transfer import Connection


class SyncRank:
    """One rank's part in the syncs over a connection; versions do not decrease, but may repeat.

    Attributes:
        version: last version that all ranks have committed.
    """

    def __init__(self, connection: Connection, version: int) -> None:
        self.version = version
        self._connection = connection
        self._barrier = connection.barrier
        self._count = 0

    def release(self) -> None:
        """Frees frames and receive buffers, which on a CPU are kept between syncs."""
        for way in self._connection.ways.values():
            way.release()

    def _sync(
        self,
        version: int,
        check: Callable[[], None],
        clear: Callable[[], None],
        transfer: Callable[[SyncStats], None],
    ) -> SyncStats:
        """Transfers one version; returns when all ranks have committed it.

        Before the transfers, all ranks meet twice: to agree on the version, and when all ways have
        begun. An error on any rank ends the sync on all; one in a transfer breaks the connection.
        Every rank raises SyncError, with the reason of the rank that failed first.

        Args:
            check: checks this rank's parameters against the plan.
            clear: clears receive buffers, before others write to them.
        """
        connection = self._connection
        ways = connection.ways.values()
        stats = SyncStats(version=version, peak_staging_bytes=sum(way.staging_bytes for way in ways))
        self._count += 1
        agreed, ready, done = sync_places(self._count)
        with stats.stage("agree"):
            self._take(agreed, lambda: self._check_version(version), check, *(way.prepare for way in ways))
            self._barrier.meet(agreed, {"version": f"{version}"})
            self._take(ready, *(way.begin for way in ways), clear)
            self._barrier.meet(ready)
            for place in sync_places(self._count - 1):  # all ranks have left the previous sync
                self._barrier.forget(place)
        self._barrier.ahead = done
        try:
            transfer(stats)
            for way in ways:
                way.finish()
            with stats.stage("commit"):
                self._barrier.meet(done)
        except SyncError:
            connection.abort()
            raise
        except Exception as error:
            try:
                self._barrier.abort(done, f"{error}")
            finally:
                connection.abort()
        self.version = version
        if connection.device.type != "cpu":
            self.release()
        return stats

    def _take(self, place: str, *steps: Callable[[], None]) -> None:
        try:
            for step in steps:
                step()
        except Exception as error:  # of any kind: the others must not wait for this rank
            self._barrier.abort(place, f"{error}")

    def _check_version(self, version: int) -> None:
        if not self._connection.connected:
            raise ValueError("its connection was closed, or broken by an aborted sync; connect anew")
        if version < self.version:
            raise ValueError(f"version {version} is below version {self.version}, which it has had")
