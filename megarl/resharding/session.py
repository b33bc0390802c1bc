"""The frame of a sync, the same for senders and receivers: agree, transfer, commit; or abort everywhere."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from megarl.resharding.records import SyncError, SyncStats
from megarl.resharding.transport import Transport


class Session:
    """One rank's part in the syncs over one connection.

    Args:
        transport: the connection.
        fingerprint: of the plan that this rank follows.
        verify: whether it expects checksums.
        version: the last committed version; the next ones are not below it. It comes again where an engine has
            dropped its weights.
    """

    def __init__(self, transport: Transport, *, fingerprint: str, verify: bool, version: int) -> None:
        self.version = version
        self._transport = transport
        self._fingerprint = fingerprint
        self._verify = verify
        self._round = 0

    @contextmanager
    def sync(self, version: int, validate: Callable[[], None]) -> Generator[SyncStats]:
        """Surrounds the transfers of one version.

        Before the block every rank validates and waits for all others to agree on plan and version: until then nothing
        has been sent or written. After it every rank waits for all others and then commits the version. An error on
        any rank ends the sync on all; one inside the block breaks the connection.

        Raises:
            SyncError: on every rank, with the first failing rank's reason.
        """
        stats = SyncStats(version=version)
        board = self._transport.board
        self._round += 1
        ready, done = f"{self._round}/ready", f"{self._round}/done"
        with stats.stage("agree"):
            try:
                if not self._transport.connected:
                    raise ValueError("its connection was closed, or broken by an aborted sync; connect anew")
                if version < self.version:
                    raise ValueError(f"version {version} is below version {self.version}, which it has had")
                validate()
            except ValueError as error:
                board.abort(ready, str(error))
            board.agree(ready, "plan", self._fingerprint)
            board.agree(ready, "version", str(version))
            board.agree(ready, "verify", str(self._verify))
            board.meet(ready)
            for place in ("ready", "done"):  # all have left the round before
                board.forget(f"{self._round - 1}/{place}")
        try:
            yield stats
            with stats.stage("commit"):
                board.meet(done)
        except SyncError:
            self._transport.abort()
            raise
        except Exception as error:
            try:
                board.abort(done, f"{error}")
            finally:
                self._transport.abort()
        self.version = version
