"""What a run is at, and how that is known: a run on another machine is judged by what it has written."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megarl.run.attempts import Attempt, End, Reason
from megarl.run.status.format import ago
from megarl.run.status.jobs import Job, JobEnd


def is_locked(path: Path) -> bool | None:
    """Whether a process holds the lock of a run's directory; None where nobody can say.

    On a file system that machines share, a lock may be seen on the machine that holds it alone: True is certain, and
    False is so where the process would be on this machine.

    Args:
        path: of the lock. It is taken for an instant, together with others who look.
    """
    try:
        with path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:  # it may not be read, or the file system has no locks
        return None
    return False


StateName = Literal[
    "finished", "running", "interrupted", "failed", "killed", "silent", "starting", "waiting", "unknown"
]
"""silent: nothing has been written for long, by a process that cannot be seen from here or by a job whose run has not
begun. starting: a job has begun, and its run has not. waiting: nothing has."""

_ENDS: dict[Reason, StateName] = {
    "finished": "finished",
    "interrupted": "interrupted",
    "config error": "failed",
    "run error": "failed",
    "exception": "failed",
}
_PATIENCE_S = 1800.0
"""Without a line, of a run that may be starting; loading a model may take that long."""
_LONGEST_STEPS = 3.0
_STOPPED = (130, 143)
"""Exit codes of who was interrupted or told to end; other signals come of failures."""


@dataclass(frozen=True, kw_only=True)
class State:
    """What a run is at.

    Args:
        name: in a word.
        because: how that is known.
        message: of what ended it; empty of a run that goes on or has finished.
        since: of its end, seconds since 1970; None of one that goes on, or where nobody can say.
    """

    name: StateName
    because: str
    message: str = ""
    since: float | None = None


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What there is to judge by.

    Args:
        finished: the run has written its summary.
        locked: see is_locked.
        attempt: the last one.
        job: of the attempt, or a later one that the run waits for.
        written: when anything was written last, seconds since 1970.
        longest: seconds of the longest of the last steps, if there are any.
        host: this machine.
        now: seconds since 1970.
    """

    finished: bool
    locked: bool | None
    attempt: Attempt | None
    job: Job | None
    written: float | None
    longest: float | None
    host: str
    now: float

    @property
    def patience(self) -> float:
        """Seconds for which a run, or a job before it, may write nothing."""
        return _PATIENCE_S if self.longest is None else max(_PATIENCE_S / 3, _LONGEST_STEPS * self.longest)


def judge(seen: Evidence) -> State:
    """What a run is at. The first that can say it does."""
    return next(_opinions(seen))


def _opinions(seen: Evidence) -> Iterator[State]:
    attempt, job = seen.attempt, seen.job
    if seen.locked:
        written = "" if seen.written is None else f"; last written {ago(seen.written, seen.now)}"
        yield State(name="running", because=f"its process holds the lock{written}")
    if seen.finished:
        yield State(name="finished", because="summary.json is there", since=_end_time(attempt))
    if attempt is None or (job is not None and not job.has(attempt)):
        yield _not_begun(job, seen)
        return
    end, job_end = attempt.end, job.end if job is not None and job.has(attempt) else None
    if job is not None and job_end is not None and (end is None or end.reason == "interrupted"):
        yield _ended(job, job_end, seen.now, "killed" if end is None else None)
    if end is not None:
        yield _told(end, job_end)
    if seen.locked is False and attempt.host == seen.host:
        message = f"process {attempt.pid} on {attempt.host} could not say why: it was killed, or the machine went down"
        yield State(name="killed", because="nobody holds its lock", message=message, since=seen.written)
    yield _elsewhere(attempt, seen)


def _not_begun(job: Job | None, seen: Evidence) -> State:
    """A run that no process has begun, or not again since its last job was started."""
    if job is None:
        return _untold(seen)
    if job.end is not None:
        return _ended(job, job.end, seen.now)
    late = seen.now - job.last_sign > seen.patience
    return State(name="silent" if late else "starting", because=job.news(seen.now), message=job.message)


def _ended(job: Job, end: JobEnd, now: float, name: StateName | None = None) -> State:
    """A job that knows more of its end than the run, which it ended or which had not begun."""
    name = name or ("finished" if end.exit_code == 0 else "interrupted" if end.exit_code in _STOPPED else "failed")
    return State(name=name, because=job.news(now), message=job.message, since=end.time)


def _told(end: End, job_end: JobEnd | None) -> State:
    """An attempt that could say how it ended; a lost node, which it may not know of, is why it failed."""
    name = _ENDS[end.reason]
    lost = [job_end.reason] if name == "failed" and job_end is not None and job_end.node is not None else []
    message = "" if name == "finished" else "\n".join([*lost, end.message])
    return State(name=name, because=f"its last attempt says so: {end.reason}", message=message, since=end.time)


def _untold(seen: Evidence) -> State:
    """A run of which no attempt is known."""
    if seen.written is None:
        return State(name="waiting", because="no process has begun it")
    because = f"nothing tells who ran it; last written {ago(seen.written, seen.now)}"
    return State(name="unknown", because=because)


def _elsewhere(attempt: Attempt, seen: Evidence) -> State:
    """A run whose process cannot be seen from here."""
    last = max(attempt.time, seen.written or 0.0)
    unseen = f"{seen.host} cannot see the processes of {attempt.host}"
    because = (
        f"last written {ago(last, seen.now)}; {'its lock cannot be read' if attempt.host == seen.host else unseen}"
    )
    return State(name="running" if seen.now - last <= seen.patience else "silent", because=because)


def _end_time(attempt: Attempt | None) -> float | None:
    return attempt.end.time if attempt is not None and attempt.end is not None else None
