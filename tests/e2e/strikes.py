"""Faults that a driver causes in its own processes, for `runs.started(before=...)`."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from typing import Any

from megarl.groups.resharder import EngineLink, SyncReport
from megarl.run.directory import RunDirectory
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


def after_checkpoint(step: int, log: str) -> None:
    """Kills the process that writes a log, when the checkpoint of a step is complete."""
    commit = RunDirectory.commit

    def struck(self: RunDirectory, taken: int, *given: Any) -> None:
        commit(self, taken, *given)
        if taken == step:
            os.kill(process_that_prints_to(self.logs.absolute() / log), signal.SIGKILL)

    RunDirectory.commit = struck
