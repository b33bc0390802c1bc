"""Calls on processes. They are watched together, because one process that fails or hangs blocks the others.

While the driver waits for one call, it watches every call in progress: it raises the first failure of any of them,
whose peers may wait in a collective forever, and an error where the oldest exceeds the time limit of its phase.
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
"""Wait for the report of a death, which may arrive after the failures that it causes."""
_LOG_TAIL_BYTES = 4000


class WorkerError(RunError):
    """A process failed, died or did not answer in time; the message names the process, the call and the cause."""


@dataclass(frozen=True, kw_only=True)
class Process(Generic[W_co]):
    """A process with an object of class W; `actor` is the handle of its `RayWorker`."""

    name: str
    actor: Any
    log_file: Path


@dataclass(eq=False, kw_only=True)
class Call(Generic[R]):
    """A method call on some processes.

    Args:
        label: name of the call in messages.
        done: a reference per process to its result for the driver.
        results: results that have arrived, by index of the process.
        seconds: durations of the method, by index of the process.
    """

    label: str
    phase: Phase
    processes: Sequence[Process[Any]]
    done: Sequence[ObjectRef[Any]]
    monitor: CallMonitor
    results: dict[int, R] = field(default_factory=dict[int, R])
    seconds: dict[int, float] = field(default_factory=dict[int, float])

    def wait(self) -> list[R]:
        """Waits for the call, and returns the result of each process.

        Raises:
            WorkerError: A process failed or exceeded its time limit, in this call or another.
        """
        self.monitor.wait_for(self)
        return [self.results[index] for index in range(len(self.done))]

    def read(self, index: int) -> None:
        """Reads the result of a process that has finished; raises RayError if it failed."""
        done: Timed[R] = ray_api.get(self.done[index])
        self.results[index], self.seconds[index] = done.result, done.seconds

    def longest(self) -> float:
        """Waits for the call, and returns the seconds of the slowest process."""
        self.wait()
        return max(self.seconds.values())

    @property
    def unanswered(self) -> list[Process[Any]]:
        """Returns the processes that have not finished."""
        return [process for index, process in enumerate(self.processes) if index not in self.results]


@dataclass(eq=False, kw_only=True)
class ChunkCall(Call[S], Generic[S, T]):
    """A call whose results by chunk, of type T, stay in the object store; other results go to the driver."""

    chunks: ChunkRefs[T]


@dataclass(eq=False, kw_only=True)
class StreamCall(Call[list[tuple[S, ObjectRef[T]]]], Generic[S, T]):
    """A call of a method that yields pairs: the first item goes to the driver, the second stays in the object store."""

    streams: Sequence[Any]

    def read(self, index: int) -> None:
        ray_api.get(self.done[index])
        refs: list[ObjectRef[Any]] = list(self.streams[index])
        first: list[S] = [ray_api.get(ref) for ref in refs[::2]]  # a failure takes the place of a first item
        self.results[index] = list(zip(first, refs[1::2], strict=True))


def gather_by_chunk(call: Call[dict[int, T] | None]) -> dict[int, T]:
    """Waits for results by chunk, and joins those of the reporting ranks."""
    return {chunk: column for result in call.wait() if result is not None for chunk, column in result.items()}


def rank0_result(call: Call[R | None]) -> R:
    """Waits for a call, and returns the result of its first reporting rank; other ranks return the same or None."""
    results = [result for result in call.wait() if result is not None]
    assert results, f"{call.label}: no rank reports"
    return results[0]


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """The failure of a process in a call; `order` is the call's position in the order of submission."""

    order: int
    call: Call[Any]
    index: int
    error: RayError

    def priority(self) -> tuple[bool, int, int]:
        """Returns the sort key: the probable cause first. A death comes first, as it breaks connections of others."""
        return not isinstance(self.error, RayActorError), self.order, self.index


C = TypeVar("C", bound=Call[Any])


class CallMonitor:
    """Watches the calls of a session.

    The time limit applies to the oldest call in progress, while the driver waits: a call may have to wait for earlier
    ones, and has its whole limit after them.
    """

    def __init__(self, limits: TimeLimits) -> None:
        self._limits = limits
        self._pending: dict[ObjectRef[Any], tuple[int, Call[Any], int]] = {}
        self._submitted = 0
        self._timed: Call[Any] | None = None
        self._since = 0.0
        self._error: WorkerError | None = None

    def follow(self, call: C) -> C:
        """Watches a submitted call, and returns it."""
        self._pending.update({ref: (self._submitted, call, index) for index, ref in enumerate(call.done)})
        self._submitted += 1
        return call

    def wait_for(self, call: Call[Any]) -> None:
        """Waits until every process has finished the call; see `Call.wait`."""
        while len(call.results) < len(call.done):
            left = (ref for index, ref in enumerate(call.done) if index not in call.results)
            if self._error is not None and not all(ref in self._pending for ref in left):
                raise self._error
            ready = ray_api.wait(list(self._pending), count=1, timeout=self._time_left())
            if not ready:
                raise WorkerError(self._overdue())
            # Takes all that have finished, because each `wait` is linear in the calls in progress.
            ready = ray_api.wait(list(self._pending), count=len(self._pending), timeout=0)
            failures = self._collect(ready)
            if failures:
                self._fail(failures)

    def _time_left(self) -> float:
        """Returns the seconds that the oldest call may still take."""
        _, oldest, _ = next(iter(self._pending.values()))
        if oldest is not self._timed:
            self._timed, self._since = oldest, time.monotonic()
        return max(0.0, self._since + getattr(self._limits, oldest.phase) - time.monotonic())

    def _overdue(self) -> str:
        """Returns the message for a call that exceeds its time; a later call may be the cause."""
        assert self._timed is not None
        calls = list(dict.fromkeys(call for _, call, _ in self._pending.values()))
        limit = getattr(self._limits, self._timed.phase)
        first, *rest = (f"{', '.join(p.name for p in call.unanswered)} in {call.label}" for call in calls)
        return "\n".join(
            [
                f"No answer within {limit:g} s from {first}.",
                f"Raise cluster.time_limits.{self._timed.phase} if it may take longer.",
                *(f"Also in progress: {other}." for other in rest),
                *(line for process in self._timed.unanswered for line in ("", *_log_tail(process))),
            ]
        )

    def _collect(self, ready: Sequence[ObjectRef[Any]]) -> list[_Failure]:
        """Reads the results of finished processes, and returns the failures."""
        failures: list[_Failure] = []
        for ref in ready:
            order, call, index = self._pending.pop(ref)
            try:
                call.read(index)
            except RayError as error:
                failures.append(_Failure(order=order, call=call, index=index, error=error))
        return failures

    def _fail(self, failures: list[_Failure]) -> None:
        """Raises the probable cause, after a moment in which the failures that follow from it arrive."""
        if self._pending:
            ready = ray_api.wait(list(self._pending), count=len(self._pending), timeout=_GRACE_S)
            failures = [*failures, *self._collect(ready)]
        cause = min(failures, key=_Failure.priority)
        self._error = WorkerError(_message(cause, failures))
        raise self._error from None


def _message(cause: _Failure, failures: Sequence[_Failure]) -> str:
    process = cause.call.processes[cause.index]
    where = f"{process.name} {{}} in {cause.call.label}"
    if isinstance(cause.error, RayTaskError):
        raised = ray_api.raised(cause.error)
        if isinstance(raised, RunError):
            return f"{where.format('failed')}: {raised}"  # complete, and the same on other ranks
        lines = [f"{where.format('failed')}: {raised!r}", "", str(cause.error).rstrip()]
    else:
        lines = [f"{where.format('died')}.", "", str(cause.error).rstrip(), "", *_log_tail(process)]
    others = sorted({failure.call.processes[failure.index].name for failure in failures} - {process.name})
    if others:
        lines += ["", f"Afterwards, perhaps as a consequence, also failed: {', '.join(others)}."]
    return "\n".join(lines)


def _log_tail(process: Process[Any]) -> list[str]:
    if not process.log_file.exists():
        return []
    text = process.log_file.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").rstrip()
    return [f"The end of {process.log_file}:", text] if text else []
