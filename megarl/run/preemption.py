"""Saving and ending a run before it is stopped: after a signal, and before its time is over."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Self

from megarl.cluster.calls import WorkerError
from megarl.cluster.driver_environment import ignore_interrupts
from megarl.config.schema import TrainingRun
from megarl.errors import PreemptedError
from megarl.run.timers import process_age

_NOTICES = (signal.SIGTERM, signal.SIGUSR1)
_END_S = 30.0
"""Time for the processes to end, before the time is over."""
_LATE_S = 3.0
"""Slurm signals the processes of all nodes of a job: a rank may end before this process gets the signal."""


class Preemption:
    """Decides whether a run ends after its current step; a context manager around the steps.

    SIGUSR1 and a first SIGTERM request it. A later SIGTERM has the effect that it had before the
    block, and so has the end of the grace. The run ends by itself when another step, as long as the
    longest one, and its checkpoint might not end in time; the first checkpoint is taken to be as
    long as the longest step. A process that is lost after SIGTERM, or shortly before it in a job of
    Slurm, was ended by it: the block then raises SystemExit.

    Args:
        grace_s: seconds after SIGTERM.
        end: end of the run's time, see `end_of_time`; None if it has no end.
    """

    def __init__(
        self, grace_s: float, end: float | None, clock: Callable[[], float] = time.time, *, in_job: bool = False
    ) -> None:
        self._grace_s = grace_s
        self._end = end
        self._clock = clock
        self._in_job = in_job
        self._signaled = False
        self._terminated = False
        self._reason = ""
        self._longest_step = 0.0
        self._mark = clock()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (*_NOTICES, signal.SIGALRM):
                self._before[number] = signal.getsignal(number)
                signal.signal(number, self._receive)
        self._mark = self._clock()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if isinstance(error, WorkerError) and not error.repeats and self._gets_sigterm():
                raise SystemExit(128 + signal.SIGTERM) from error
        finally:
            if self._signaled:
                signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in self._before.items():
                if signal.getsignal(number) == self._receive:
                    signal.signal(number, handler)

    def _gets_sigterm(self) -> bool:
        """Returns whether SIGTERM has come; in a job of Slurm, waits for it."""
        deadline = time.monotonic() + _LATE_S * self._in_job
        while not self._terminated and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._terminated

    def leaves(self, save_s: float = 0.0) -> bool:
        """Notes the end of a step; returns whether the run saves, in `save_s` seconds, and ends."""
        before = self._mark
        self._mark = self._clock()
        self._longest_step = max(self._longest_step, self._mark - before)
        needed = self._longest_step + (save_s or self._longest_step) + _END_S
        if self._end is not None and self._clock() + needed > self._end:
            self._reason = self._reason or "its time is over"
        return bool(self._reason)

    async def saved(self, step: int, wait: Callable[[], Awaitable[object]]) -> None:
        """Notes a save; if the run ends, awaits the commit, and raises PreemptedError."""
        self._mark = self._clock()
        if self._reason:
            await wait()
            ignore_interrupts()
            raise PreemptedError(f"preempted after step {step}: {self._reason}. Run the same command to continue")

    def _receive(self, number: int, frame: Any) -> None:
        at_once = number == signal.SIGTERM and (self._signaled or not self._grace_s)
        if at_once or number == signal.SIGALRM:
            self._before[signal.SIGTERM](signal.SIGTERM, frame)
        elif not self._signaled:
            self._signaled = True
            self._reason = self._reason or f"it got {signal.Signals(number).name}"
            limits: list[float] = []
            if number == signal.SIGTERM:
                self._terminated = True
                limits.append(self._grace_s)
            if self._end is not None:
                limits.append(max(1.0, self._end - _END_S - self._clock()))
            signal.setitimer(signal.ITIMER_REAL, min(limits, default=0))
            with suppress(OSError):  # print could be interrupted by this
                os.write(2, f"{self._reason}: the run saves after this step, and ends\n".encode())


def end_of_time(run: TrainingRun, environment: Mapping[str, str]) -> float | None:
    """Returns when the time of this process is over, seconds since 1970: by `run.time_limit`, or with its Slurm job."""
    ends: list[float] = []
    job_end = environment.get("SLURM_JOB_END_TIME", "")
    if job_end.isdigit() and int(job_end):
        ends.append(float(job_end))
    if run.time_limit is not None:
        ends.append(time.time() - process_age() + run.time_limit)
    return min(ends, default=None)
