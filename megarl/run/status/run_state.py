"""The state of a run: from its lock where that is visible, else from its last writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megarl.run.attempts import Attempt, AttemptEnd
from megarl.run.status.format import ago

StateName = Literal[
    "finished",
    "profiled",
    "running",
    "preempted",
    "interrupted",
    "failed",
    "killed",
    "silent",
    "waiting",
    "unknown",
]
"""silent: a process that is not visible from here has written nothing for long.
waiting: nothing has started."""

_PATIENCE_S = 1800.0
"""Before the first step: loading a model may take that long."""
_LONGEST_STEPS = 3.0


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run.

    Args:
        because: the evidence; empty where the name says everything.
        message: the error that ended it; empty for a run that continues or has finished.
        since: time of its end, seconds since 1970; None if it continues or that is unknown.
    """

    name: StateName
    because: str = ""
    message: str = ""
    since: float | None = None


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The known facts of a run. Times are seconds since 1970.

    Args:
        finished: the summary exists.
        locked: a process holds the lock; None if that cannot be determined.
        attempt: the last one.
        written: time of the last write of anything.
        longest: seconds of the longest of the last steps, if any.
        host: this machine.
    """

    finished: bool
    locked: bool | None
    attempt: Attempt | None
    written: float | None
    longest: float | None
    host: str
    now: float

    @property
    def patience(self) -> float:
        """Seconds that a run may be silent."""
        if self.longest is None:
            return _PATIENCE_S
        return max(_PATIENCE_S / 3, _LONGEST_STEPS * self.longest)


def determine_state(evidence: Evidence) -> RunState:
    """Returns the state by the strongest evidence."""
    attempt = evidence.attempt
    if evidence.locked:
        because = "its process holds the lock"
        if evidence.written is not None:
            because += f"; last written {ago(evidence.written, evidence.now)}"
        return RunState(name="running", because=because)
    if evidence.finished:
        since = None
        if attempt is not None and attempt.end is not None:
            since = attempt.end.time
        return RunState(name="finished", since=since)
    if attempt is None:
        return _without_attempt(evidence)
    if attempt.end is not None:
        return _ended(attempt.end)
    if evidence.locked is False and attempt.host == evidence.host:
        message = f"process {attempt.pid} on {attempt.host} wrote no reason: it was killed, or the machine went down"
        because = "no process holds its lock"
        return RunState(name="killed", because=because, message=message, since=evidence.written)
    return _by_last_write(attempt, evidence)


def _without_attempt(evidence: Evidence) -> RunState:
    if evidence.written is None:
        return RunState(name="waiting", because="no process has started it")
    written = ago(evidence.written, evidence.now)
    return RunState(name="unknown", because=f"no record of who ran it; last written {written}")


def _ended(end: AttemptEnd) -> RunState:
    """Returns the state after an attempt that recorded its end."""
    if end.reason in ("finished", "profiled"):
        return RunState(name=end.reason, since=end.time)
    name: StateName = "failed"
    if end.reason in ("preempted", "interrupted"):
        name = end.reason
    because = "" if name == end.reason else end.reason
    return RunState(name=name, because=because, message=end.message, since=end.time)


def _by_last_write(attempt: Attempt, evidence: Evidence) -> RunState:
    """Returns the state of a run whose process cannot be seen from this machine."""
    last = max(attempt.time, evidence.written or 0.0)
    unseen = f"{evidence.host} cannot see the processes of {attempt.host}"
    if attempt.host == evidence.host:
        unseen = "its lock cannot be read"
    name: StateName = "silent"
    if evidence.now - last <= evidence.patience:
        name = "running"
    return RunState(name=name, because=f"last written {ago(last, evidence.now)}; {unseen}")
