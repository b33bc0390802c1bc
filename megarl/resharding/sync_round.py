"""The frame of a sync, the same for senders and receivers: agree, transfer, commit; or abort everywhere."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NoReturn

from megarl.resharding.sync_barrier import SyncError, SyncStats
from megarl.resharding.wire import Connection


class SyncRound:
    """One rank's part in the syncs over one connection.

    Args:
        connection: to the others.
        version: the last committed version; the next ones are not below it. It comes again where an engine has
            dropped its weights.
    """

    def __init__(self, connection: Connection, version: int) -> None:
        self.version = version
        self._connection = connection
        self._barrier = connection.barrier
        self._round = 0

    @contextmanager
    def sync(self, version: int, offer: Callable[[], None], join: Callable[[], None]) -> Generator[SyncStats]:
        """Surrounds the transfers of one version.

        Before the block every rank waits twice for all others: to agree on the version, and until all have what
        they need of each other. Until then nothing has been sent or written. After it every rank waits for all others
        and then commits the version. An error on any rank ends the sync on all; one inside the block breaks the
        connection.

        Args:
            offer: checks what this rank has, and posts what others need of it.
            join: takes what others have posted.

        Raises:
            SyncError: on every rank, with the first failing rank's reason.
        """
        stats = SyncStats(version=version)
        self._round += 1
        agreed, ready, done = (f"{self._round}/{place}" for place in ("agreed", "ready", "done"))
        with stats.stage("agree"):
            self._check(agreed, lambda: self._check_version(version))
            self._check(agreed, offer)
            self._barrier.meet(agreed, {"version": f"{version}"})
            self._check(ready, join)
            self._barrier.meet(ready)
            for place in ("agreed", "ready", "done"):  # all have left the round before
                self._barrier.forget(f"{self._round - 1}/{place}")
        self._barrier.ahead = done
        try:
            yield stats
            with stats.stage("commit"):
                self._barrier.meet(done)
        except SyncError:
            self._connection.abort()
            raise
        except Exception as error:
            self._break(done, error)
        self.version = version

    def _check(self, place: str, step: Callable[[], None]) -> None:
        """Aborts where a step fails."""
        try:
            step()
        except Exception as error:  # whatever it is, the others must not wait for this rank
            self._barrier.abort(place, f"{error}")

    def _check_version(self, version: int) -> None:
        if not self._connection.connected:
            raise ValueError("its connection was closed, or broken by an aborted sync; connect anew")
        if version < self.version:
            raise ValueError(f"version {version} is below version {self.version}, which it has had")

    def _break(self, place: str, error: Exception) -> NoReturn:
        try:
            self._barrier.abort(place, f"{error}")
        finally:
            self._connection.abort()
