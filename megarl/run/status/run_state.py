"""The state of a run, by evidence: that of a run on another machine follows from its last writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from megarl.errors import PreemptedError
from megarl.run.attempts import Attempt, AttemptEnd
from megarl.run.status.format import ago
from megarl.run.status.jobs import JobEnd, JobStatus

StateName = Literal[
    "finished",
    "profiled",
    "running",
    "preempted",
    "interrupted",
    "failed",
    "killed",
    "silent",
    "starting",
    "waiting",
    "unknown",
]
"""silent: no write for long, by a process that is not visible from here or by a job before its run starts.
starting: a job has started, but not its run. waiting: neither has started."""

_PATIENCE_S = 1800.0  # before the first step: loading a model may take that long
_LONGEST_STEPS = 3.0
_STOPPED = (130, 143)  # exit codes of SIGINT and SIGTERM; other signals are failures


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run.

    Args:
        because: the evidence.
        message: of what ended it; empty for a run that continues or has finished.
        since: of its end, seconds since 1970; None if it continues or that is unknown.
    """

    name: StateName
    because: str
    message: str = ""
    since: float | None = None


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The known facts of a run. Times are seconds since 1970.

    Args:
        finished: the summary exists.
        locked: a process holds the lock; None if that cannot be determined.
        attempt: the last one.
        job: of the attempt, or a later one that will have the run.
        written: the last write of anything.
        longest: seconds of the longest of the last steps, if any.
        host: this machine.
    """

    finished: bool
    locked: bool | None
    attempt: Attempt | None
    job: JobStatus | None
    written: float | None
    longest: float | None
    host: str
    now: float

    @property
    def patience(self) -> float:
        """Seconds that a run, or a job before it, may be silent."""
        return _PATIENCE_S if self.longest is None else max(_PATIENCE_S / 3, _LONGEST_STEPS * self.longest)


def determine_state(seen: Evidence) -> RunState:
    """Returns the state by the strongest evidence."""
    return next(_by_evidence(seen))


def _by_evidence(seen: Evidence) -> Iterator[RunState]:
    attempt = seen.attempt
    job = seen.job
    if seen.locked:
        written = "" if seen.written is None else f"; last written {ago(seen.written, seen.now)}"
        yield RunState(name="running", because=f"its process holds the lock{written}")
    if seen.finished:
        since = attempt.end.time if attempt is not None and attempt.end is not None else None
        yield RunState(name="finished", because="summary.json is there", since=since)
    if attempt is None or (job is not None and not job.has(attempt)):
        yield _not_started(job, seen)
        return
    end = attempt.end
    job_end = job.end if job is not None and job.has(attempt) else None
    if job is not None and job_end is not None and (end is None or end.reason == "interrupted"):
        yield _job_ended(job, job_end, seen.now, "killed" if end is None else None)
    if end is not None:
        yield _attempt_ended(end, job_end)
    if seen.locked is False and attempt.host == seen.host:
        message = f"process {attempt.pid} on {attempt.host} wrote no reason: it was killed, or the machine went down"
        yield RunState(name="killed", because="no process holds its lock", message=message, since=seen.written)
    yield _on_other_machine(attempt, seen)


def _not_started(job: JobStatus | None, seen: Evidence) -> RunState:
    """Returns the state of a run without an attempt, or without one since its last job started."""
    if job is None and seen.written is None:
        return RunState(name="waiting", because="no process has started it")
    if job is None:
        because = f"no record of who ran it; last written {ago(seen.written or 0.0, seen.now)}"
        return RunState(name="unknown", because=because)
    if job.end is not None:
        return _job_ended(job, job.end, seen.now)
    late = seen.now - job.last_sign > seen.patience
    return RunState(name="silent" if late else "starting", because=job.news(seen.now), message=job.message)


def _job_ended(job: JobStatus, end: JobEnd, now: float, name: StateName | None = None) -> RunState:
    """Returns the state of a run that its job ended, or whose job ended before the run started."""
    known: Mapping[int, StateName] = {0: "finished", PreemptedError.exit_code: "preempted"}
    name = name or known.get(end.exit_code, "interrupted" if end.exit_code in _STOPPED else "failed")
    return RunState(name=name, because=job.news(now), message=job.message, since=end.time)


def _attempt_ended(end: AttemptEnd, job_end: JobEnd | None) -> RunState:
    """Returns the state after an attempt that recorded its end.

    Only the job knows that a node was lost, or that it was cancelled while the driver lost its processes.
    """
    name = end.reason if end.reason in ("finished", "profiled", "preempted", "interrupted") else "failed"
    causes: list[str] = []
    if name == "failed" and job_end is not None:
        stopped = job_end.exit_code in _STOPPED
        name = "interrupted" if stopped else "failed"
        causes = [job_end.reason] if stopped or job_end.node is not None else []
    message = "" if name in ("finished", "profiled") else "\n".join([*causes, end.message])
    return RunState(name=name, because=f"its last attempt ended: {end.reason}", message=message, since=end.time)


def _on_other_machine(attempt: Attempt, seen: Evidence) -> RunState:
    last = max(attempt.time, seen.written or 0.0)
    here = attempt.host == seen.host
    unseen = "its lock cannot be read" if here else f"{seen.host} cannot see the processes of {attempt.host}"
    because = f"last written {ago(last, seen.now)}; {unseen}"
    return RunState(name="running" if seen.now - last <= seen.patience else "silent", because=because)
