"""Faults that a driver causes in its own engines, for `runs.started(before=...)`."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial

from megarl.cluster.resharder import EngineLink, SyncReport
from tests.e2e.test_endings import process_that_prints_to


def after_sync_begins(version: int, name: str, seconds: float) -> None:
    """Sends a signal to the last engine so many seconds after the sync of a version begins; 0 is just before."""
    update = EngineLink.update

    def struck(self: EngineLink, sent: int) -> SyncReport | None:
        if sent == version:
            process = process_that_prints_to(self._engines.processes[-1].log_file)
            strike = partial(os.kill, process, getattr(signal, name))
            threading.Timer(seconds, strike).start() if seconds else strike()
        return update(self, sent)

    EngineLink.update = struck
