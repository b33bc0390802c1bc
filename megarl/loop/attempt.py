"""This process's attempt at a run: its start and its end, whatever the end, go into the run's directory."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from megarl.cluster.environment import ignore_interrupts, interrupts_raise
from megarl.config import ConfigError
from megarl.errors import RunError
from megarl.loop.directory import RunPaths
from megarl.obs.attempts import AttemptLog, Reason
from megarl.obs.lines import read_lines


@contextmanager
def attempt(directory: RunPaths, taken: int = 0) -> Iterator[None]:
    """Lasts as long as this process has the run's directory. SIGTERM raises SystemExit meanwhile.

    Args:
        directory: of the run.
        taken: steps that were taken before.
    """
    log = AttemptLog(directory.attempts)
    with interrupts_raise():
        log.start(taken)
        try:
            yield
        except BaseException as error:
            ignore_interrupts()
            log.end(_step(directory, taken), *_told(error))
            raise
        ignore_interrupts()
        log.end(_step(directory, taken), "finished")


def _step(directory: RunPaths, taken: int) -> int:
    """The last step that the run has told of."""
    with suppress(OSError):  # it must not hide what ended the run
        for line in read_lines(directory.metrics, last=1):
            return line.get("step", taken)
    return taken


def _told(error: BaseException) -> tuple[Reason, str]:
    """What ended the run, and what its user reads of it."""
    match error:
        case KeyboardInterrupt():
            return "interrupted", signal.SIGINT.name
        case SystemExit():
            return "interrupted", signal.SIGTERM.name
        case ConfigError():
            return "config error", str(error)
        case RunError():
            return "run error", str(error)
        case _:
            return "exception", "".join(traceback.format_exception_only(error)).strip()
