"""Calls on processes: submitted at once, watched together, so that any failure ends the run with its cause.

A rank that fails leaves the others of its group waiting in a collective. So the driver never waits for one
result: whatever it waits for, it looks at every call in progress, and the first failure is raised. A rank that
hangs leaves them waiting too: every call belongs to a phase of the step, which has a time limit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from ray import ObjectRef
from ray.exceptions import RayActorError, RayError, RayTaskError

from megarl.cluster import ray_api
from megarl.cluster.ray_worker import ChunkRefs, Timed
from megarl.config.schema import TimeLimits
from megarl.errors import RunError
from megarl.remote import Phase

W_co = TypeVar("W_co", covariant=True)
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

_GRACE_S = 4.0
"""For the news of a death, which may come after the failures that it causes."""
_LOG_TAIL_BYTES = 4000


class WorkerError(RunError):
    """A process of the run failed, died or did not answer in time; the message names it, the call and the cause."""


@dataclass(frozen=True, kw_only=True)
class Process(Generic[W_co]):
    """A process of the run with an object of class W.

    Args:
        name: for messages.
        actor: handle of its RayWorker.
        log_file: where it prints.
    """

    name: str
    actor: Any
    log_file: Path


@dataclass(eq=False, kw_only=True)
class Call(Generic[R]):
    """A method call on some processes, in progress.

    Args:
        label: what was called, for messages.
        phase: whose time limit the call has.
        processes: that run it.
        done: one reference per process, to its small result.
        monitor: of the session.
        results: the small results that are there, by process.
        seconds: that these processes took.
    """

    label: str
    phase: Phase
    processes: Sequence[Process[Any]]
    done: Sequence[ObjectRef[Any]]
    monitor: CallMonitor
    results: dict[int, R] = field(default_factory=dict[int, R])
    seconds: dict[int, float] = field(default_factory=dict[int, float])

    def wait(self) -> list[R]:
        """Returns the small results, by process.

        Consumes nothing else; waits for this call, and is woken by the failure of any call of the session.

        Raises:
            WorkerError: a process failed or exceeded its time, in this call or another.
        """
        self.monitor.wait_for(self)
        return [self.results[index] for index in range(len(self.done))]

    def read(self, index: int) -> None:
        """Takes the result of a process that has finished.

        Raises:
            RayError: it has failed.
        """
        done: Timed[R] = ray_api.get(self.done[index])
        self.results[index], self.seconds[index] = done.result, done.seconds

    def longest(self) -> float:
        """Waits for the call; returns the seconds of the process that took most of them.

        Raises:
            WorkerError: a process failed or exceeded its time, in this call or another.
        """
        self.wait()
        return max(self.seconds.values())

    @property
    def unanswered(self) -> list[Process[Any]]:
        """The processes that have not finished."""
        return [process for index, process in enumerate(self.processes) if index not in self.results]


@dataclass(eq=False, kw_only=True)
class ChunkCall(Call[S], Generic[S, T]):
    """A call whose large results, of type T, stay where they are made: ``chunks`` are the references to them."""

    chunks: ChunkRefs[T]


@dataclass(eq=False, kw_only=True)
class StreamCall(Call[list[tuple[S, ObjectRef[T]]]], Generic[S, T]):
    """A call of a method that yields pairs, in their order: something small, and a reference to what stays there."""

    streams: Sequence[Any]

    def read(self, index: int) -> None:
        ray_api.get(self.done[index])
        refs: list[ObjectRef[Any]] = list(self.streams[index])
        small: list[S] = [ray_api.get(ref) for ref in refs[::2]]  # a failure comes in place of something small
        self.results[index] = list(zip(small, refs[1::2], strict=True))


def gather_by_chunk(call: Call[dict[int, T] | None]) -> dict[int, T]:
    """Waits for small results by chunk, such as scores, and joins those of the reporting ranks."""
    return {chunk: column for result in call.wait() if result is not None for chunk, column in result.items()}


def rank0_result(call: Call[R | None]) -> R:
    """Waits for a call and returns the result of its first reporting rank; the others have the same or None."""
    return next(result for result in call.wait() if result is not None)


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """One process's failure in one call; sorts before those that it may have caused."""

    order: int
    call: Call[Any]
    index: int
    error: RayError

    def rank(self) -> tuple[bool, int, int]:
        """Deaths first, as they break the connections of the others; then in order of submission."""
        return not isinstance(self.error, RayActorError), self.order, self.index


C = TypeVar("C", bound=Call[Any])


class CallMonitor:
    """Every call of a session that is in progress.

    The oldest of them is timed, from the moment at which the driver waits for it: an earlier call may be what a later
    one waits for, so that every call has the whole limit of its phase.

    Args:
        limits: of the phases, seconds.
    """

    def __init__(self, limits: TimeLimits) -> None:
        self._limits = limits
        self._pending: dict[ObjectRef[Any], tuple[int, Call[Any], int]] = {}
        self._submitted = 0
        self._timed: Call[Any] | None = None
        self._since = 0.0

    def follow(self, call: C) -> C:
        """Watches a call that was submitted; returns it."""
        self._pending.update({ref: (self._submitted, call, index) for index, ref in enumerate(call.done)})
        self._submitted += 1
        return call

    def wait_for(self, call: Call[Any]) -> None:
        """Waits until every process has finished the call.

        Raises:
            WorkerError: a process failed or exceeded its time, in this call or another.
        """
        while len(call.results) < len(call.done):
            ready = ray_api.wait(list(self._pending), count=1, timeout=self._time_left())
            if not ready:
                raise WorkerError(self._overdue())
            # All that is there at once: each look goes through every call in progress.
            ready = ray_api.wait(list(self._pending), count=len(self._pending), timeout=0)
            failures = self._collect(ready)
            if failures:
                self._fail(failures)

    def _time_left(self) -> float:
        """Seconds that the oldest call in progress may still take."""
        _, oldest, _ = next(iter(self._pending.values()))
        if oldest is not self._timed:
            self._timed, self._since = oldest, time.monotonic()
        return max(0.0, self._since + getattr(self._limits, oldest.phase) - time.monotonic())

    def _overdue(self) -> str:
        """Who has not answered what: the timed call first, then the later ones, which may be its cause."""
        assert self._timed is not None
        calls = list(dict.fromkeys(call for _, call, _ in self._pending.values()))
        limit = getattr(self._limits, self._timed.phase)
        first, *rest = (f"{_names(call.unanswered)} in {call.label}" for call in calls)
        return "\n".join(
            [
                f"No answer within {limit:g} s from {first}.",
                f"Raise cluster.time_limits.{self._timed.phase} if it may take longer.",
                *(f"Also in progress: {other}." for other in rest),
                *(line for process in self._timed.unanswered for line in ("", *_last_words(process))),
            ]
        )

    def _collect(self, ready: Sequence[ObjectRef[Any]]) -> list[_Failure]:
        """Takes the results that are there, and returns the failures."""
        failures: list[_Failure] = []
        for ref in ready:
            order, call, index = self._pending.pop(ref)
            try:
                call.read(index)
            except RayError as error:
                failures.append(_Failure(order=order, call=call, index=index, error=error))
        return failures

    def _fail(self, failures: list[_Failure]) -> None:
        """Raises the cause among the failures of the next moment: one failure soon brings others with it."""
        if self._pending:
            ready = ray_api.wait(list(self._pending), count=len(self._pending), timeout=_GRACE_S)
            failures = [*failures, *self._collect(ready)]
        cause = min(failures, key=_Failure.rank)
        raise WorkerError(_message(cause, failures)) from None


def _names(processes: Sequence[Process[Any]]) -> str:
    return ", ".join(process.name for process in processes)


def _message(cause: _Failure, failures: Sequence[_Failure]) -> str:
    process = cause.call.processes[cause.index]
    where = f"{process.name} {{}} in {cause.call.label}"
    if isinstance(cause.error, RayTaskError):
        raised = ray_api.raised(cause.error)
        if isinstance(raised, RunError):
            return f"{where.format('failed')}: {raised}"  # all that there is to say; the others say the same
        lines = [f"{where.format('failed')}: {raised!r}", "", str(cause.error).rstrip()]
    else:
        lines = [f"{where.format('died')}.", "", str(cause.error).rstrip(), "", *_last_words(process)]
    others = sorted({failure.call.processes[failure.index].name for failure in failures} - {process.name})
    if others:
        lines += ["", f"After it, or because of it, also failed: {', '.join(others)}."]
    return "\n".join(lines)


def _last_words(process: Process[Any]) -> list[str]:
    """The end of what a process printed."""
    if not process.log_file.exists():
        return []
    text = process.log_file.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").rstrip()
    return [f"The end of {process.log_file}:", text] if text else []
