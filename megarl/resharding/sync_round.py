"""The protocol of a sync, shared by senders and receivers: agree, transfer, commit, or abort everywhere."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from megarl.resharding.sync_barrier import SyncError, SyncStats, sync_places
from megarl.resharding.wire import Connection


class SyncRound:
    """One rank's part in the syncs over a connection; versions do not decrease, but may repeat."""

    def __init__(self, connection: Connection, version: int) -> None:
        self.version = version
        self._connection = connection
        self._barrier = connection.barrier
        self._round = 0

    @contextmanager
    def sync(self, version: int, offer: Callable[[], None], join: Callable[[], None]) -> Generator[SyncStats]:
        """Surrounds the transfers of one version.

        Before the block, all ranks meet twice: to agree on the version, and when all have mapped the memory that they
        write. After it they meet again and commit the version. An error on any rank ends the sync on all; one inside
        the block breaks the connection. Every rank raises SyncError, with the reason of the rank that failed first.

        Args:
            offer: checks this rank's state and posts its memory.
            join: maps the memory that others have posted.
        """
        stats = SyncStats(version=version)
        self._round += 1
        agreed, ready, done = sync_places(self._round)
        with stats.stage("agree"):
            self._check(agreed, lambda: self._check_version(version))
            self._check(agreed, offer)
            self._barrier.meet(agreed, {"version": f"{version}"})
            self._check(ready, join)
            self._barrier.meet(ready)
            for place in sync_places(self._round - 1):  # all ranks have left the previous round
                self._barrier.forget(place)
        self._barrier.ahead = done
        try:
            yield stats
            with stats.stage("commit"):
                self._barrier.meet(done)
        except SyncError:
            self._connection.abort()
            raise
        except Exception as error:
            try:
                self._barrier.abort(done, f"{error}")
            finally:
                self._connection.abort()
        self.version = version

    def _check(self, place: str, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:  # of any kind: the others must not wait for this rank
            self._barrier.abort(place, f"{error}")

    def _check_version(self, version: int) -> None:
        if not self._connection.connected:
            raise ValueError("its connection was closed, or broken by an aborted sync; connect anew")
        if version < self.version:
            raise ValueError(f"version {version} is below version {self.version}, which it has had")
