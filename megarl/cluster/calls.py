"""Calls on processes. They are watched together, because one process that fails or hangs blocks the others.

While the driver waits for one call, it watches every call in progress: it raises the first failure of any of them,
whose peers may wait in a collective forever, and an error where one exceeds the time limit of its phase.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ray import ObjectRef
from ray.exceptions import RayActorError, RayError, RayTaskError

from megarl.cluster import ray_api
from megarl.cluster.ray_worker import ChunkRefs, Timed
from megarl.cluster.spans import Span
from megarl.config.schema import TimeLimits
from megarl.errors import RunError
from megarl.remote import Phase
from megarl.texts import printable

T = TypeVar("T")

_GRACE_S = 4.0
"""Wait for the report of a death, which may arrive after the failures that it causes."""


class WorkerError(RunError):
    """A process failed, died or did not answer in time; the message names the process, the call and the cause."""

    repeats = False
    """Whether new processes would fail in the same way; see `ray_api.repeats`."""


@dataclass(frozen=True, kw_only=True)
class Process[W_co]:
    """A process with an object of class W; `actor` is the handle of its `RayWorker`.

    Args:
        concurrent: a call does not wait for the end of earlier ones.
        numbers: of its calls.
    """

    name: str
    actor: Any
    log_file: Path
    concurrent: bool = False
    numbers: Iterator[int] = field(default_factory=itertools.count, compare=False)

    def log_tail(self) -> list[str]:
        """Returns a heading and the end of the log; nothing of an empty one."""
        text = self.log_file.read_bytes()[-4000:] if self.log_file.exists() else b""
        end = printable(text.decode(errors="replace"))
        return [f"The end of {self.log_file}:", end.rstrip()] if text.strip() else []


class Awaited(Protocol):
    """Something that calls in progress finish."""

    @property
    def finished(self) -> bool: ...


@dataclass(frozen=True)
class Condition:
    """Awaits that something holds."""

    holds: Callable[[], bool]

    @property
    def finished(self) -> bool:
        return self.holds()


Routine = Generator[Awaited, None, T]
"""Work that takes several calls, one after the other: it yields what it waits for, and returns its result."""


class Task[T]:
    """A routine in progress."""

    def __init__(self, routine: Routine[T]) -> None:
        self._routine = routine
        self._awaited: Awaited | None = None
        self._results: list[T] = []
        self._error: BaseException | None = None

    @property
    def finished(self) -> bool:
        return bool(self._results)

    @property
    def result(self) -> T:
        return self._results[0]

    def advance(self) -> Awaited:
        """Goes on as far as results have arrived, and returns what the task waits for then; raises its error."""
        if self._error is not None:
            raise self._error
        while not self.finished and (self._awaited is None or self._awaited.finished):
            try:
                self._awaited = next(self._routine)
            except StopIteration as end:
                self._results.append(end.value)
            except BaseException as error:
                self._error = error
                raise
        return self if self.finished or self._awaited is None else self._awaited


def together[T](routines: Iterable[Routine[T]]) -> Routine[list[T]]:
    """Runs routines at the same time; returns their results in the order of the routines."""
    tasks = [Task(routine) for routine in routines]
    while unfinished := [task for task in tasks if not task.finished]:
        awaited = [task.advance() for task in unfinished]
        yield Condition(lambda awaited=awaited: any(each.finished for each in awaited))
    return [task.result for task in tasks]


@dataclass(eq=False, kw_only=True)
class Call[R]:
    """A method call on some processes.

    Args:
        label: name of the call in messages.
        done: a reference per process to its result for the driver.
        results: results that have arrived, by index of the process.
        seconds: durations of the method, by index of the process.
        then: called when the last result has arrived, while the driver waits for this call or another.
        lost: called with the cause when a process has died or exceeded the time limit, in place of an error.
        late: called with the message when processes exceed the time limit; returns whether all get another one.
        tolerates: errors of this kind end a process's part of the call, as messages in `errors`.
        after: calls whose results the processes wait for; the time limit begins when they are finished.
        beside: an earlier call whose processes these meet; the time limit begins with that of this call.
    """

    label: str
    phase: Phase
    processes: Sequence[Process[Any]]
    done: Sequence[ObjectRef[Any]]
    monitor: CallMonitor
    results: dict[int, R] = field(default_factory=dict[int, R])
    seconds: dict[int, float] = field(default_factory=dict[int, float])
    then: Callable[[], None] | None = None
    lost: Callable[[str], None] | None = None
    late: Callable[[str], bool] | None = None
    tolerates: type[RunError] | None = None
    errors: dict[int, str] = field(default_factory=dict[int, str])
    after: Sequence[Call[Any]] = ()
    beside: Call[Any] | None = None

    @property
    def finished(self) -> bool:
        """Returns whether all processes have answered."""
        return len(self.results) + len(self.errors) == len(self.done)

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
        if self.monitor.observer is not None:
            self.monitor.observer(self.processes[index].name, self.label.partition(".")[0], done.spans)

    def longest(self) -> float:
        """Waits for the call, and returns the seconds of the slowest process."""
        self.wait()
        return max(self.seconds.values())

    @property
    def unanswered(self) -> list[Process[Any]]:
        """Returns the processes that have not finished."""
        answered = {*self.results, *self.errors}
        return [process for index, process in enumerate(self.processes) if index not in answered]

    def __str__(self) -> str:
        return f"{', '.join(process.name for process in self.unanswered)} in {self.label}"


@dataclass(eq=False, kw_only=True)
class ChunkCall[S, T](Call[S]):
    """A call whose results by chunk, of type T, stay in the object store; other results go to the driver."""

    chunks: ChunkRefs[T]


def gather_by_chunk[T](call: Call[dict[int, T] | None]) -> dict[int, T]:
    """Waits for results by chunk, and joins those of the reporting ranks."""
    return {chunk: column for result in call.wait() if result is not None for chunk, column in result.items()}


def rank0_result[R](call: Call[R | None]) -> R:
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

    A call has its whole time limit from the moment when all its processes have finished the earlier ones, as those that
    are ready may wait for the others, and the calls that it waits for are finished.
    """

    def __init__(self, limits: TimeLimits) -> None:
        self._limits = limits
        self._pending: dict[ObjectRef[Any], tuple[int, Call[Any], int]] = {}
        self._ends: dict[ObjectRef[Any], float] = {}
        self._submitted = 0
        self._error: WorkerError | None = None
        self.listeners: list[Callable[[], None]] = []
        """Called again and again while the driver waits for something."""
        self.explainer: Callable[[Sequence[str]], Sequence[str]] = lambda late: ()
        """Called with the names of the processes that exceed a time limit; says what they do."""
        self.observer: Callable[[str, str, Sequence[Span]], None] | None = None
        """Called with a process, its group or role, and what it has done; processes return that with each result."""

    def follow(self, call: C) -> C:
        """Watches a submitted call, and returns it."""
        self._pending.update({ref: (self._submitted, call, index) for index, ref in enumerate(call.done)})
        self._submitted += 1
        return call

    def starts(self, process: Process[Any]) -> bool:
        """Returns whether a process is still starting."""
        return any(c.phase == "start" and c.processes[index] is process for _, c, index in self._pending.values())

    def in_progress(self) -> list[str]:
        """Returns a line per call in progress, with the seconds of its time limit; any thread may ask."""
        now = time.monotonic()
        ends = self._ends
        told = dict[Call[Any], str]()
        for ref, (_, call, _) in list(self._pending.items()):
            limit: float = getattr(self._limits, call.phase)
            told[call] = f"{limit - ends[ref] + now:.0f} of {limit:g} s" if ref in ends else "its limit has not begun"
        return [f"{call}: {waited}" for call, waited in told.items()]

    def wait_for(self, call: Call[Any]) -> None:
        """Waits until every process has finished the call; see `Call.wait`."""
        while not call.finished:
            left = (ref for index, ref in enumerate(call.done) if index not in call.results)
            if self._error is not None and not all(ref in self._pending for ref in left):
                raise self._error
            self._wait_for_any()

    def wait_until(self, awaited: Awaited) -> None:
        """Waits until `awaited` is finished; raises WorkerError as `wait_for` does."""
        while not awaited.finished:
            if not self._pending:
                raise self._error or RuntimeError(f"no call is in progress that could finish {awaited}")
            self._wait_for_any()

    def _wait_for_any(self) -> None:
        """Waits until a process has finished a call, and takes the results of all that have."""
        ends = self._time_limits()
        ready = ray_api.wait(list(self._pending), count=1, timeout=max(0.0, min(ends.values()) - time.monotonic()))
        if ready:
            # Takes all that have finished, because each `wait` is linear in the calls in progress.
            ready = ray_api.wait(list(self._pending), count=len(self._pending), timeout=0)
        failures = self._collect(ready)
        if failures:
            self._fail(failures)
        for listener in self.listeners:
            listener()
        now = time.monotonic()
        overdue = [ref for ref, end in ends.items() if end <= now and ref in self._pending]
        if overdue:  # what came while the results were handled is not late
            came = ray_api.wait(overdue, count=len(overdue), timeout=0)
            overdue = [ref for ref in overdue if ref not in came]
        for ref in sorted(overdue, key=lambda ref: ends[ref]):
            if ref not in self._ends:  # another process of its call was late
                continue
            _, late, _ = self._pending[ref]
            message = self._overdue(late)
            if late.late is not None and late.late(message):
                for each in late.done:
                    self._ends.pop(each, None)
                continue
            if late.lost is None:
                raise WorkerError(message)
            del self._pending[ref]
            self._lose(late, message)

    def _time_limits(self) -> Mapping[ObjectRef[Any], float]:
        """Returns when the time limits end of the calls that wait for no earlier one; there is at least one."""
        now = time.monotonic()
        busy = set[int]()
        queued = set[Call[Any]]()
        for _, call, index in self._pending.values():
            process = call.processes[index]
            waits = id(process) in busy and not process.concurrent
            if waits or call.beside in queued or not all(earlier.finished for earlier in call.after):
                queued.add(call)
            busy.add(id(process))
        running = {ref: call for ref, (_, call, _) in self._pending.items() if call not in queued}
        limits: dict[str, float] = self._limits.model_dump()
        self._ends = {ref: self._ends.get(ref, now + limits[call.phase]) for ref, call in running.items()}
        return self._ends

    def _overdue(self, late: Call[Any]) -> str:
        """Returns the message for a call that exceeds its time; another call may be the cause."""
        calls = dict.fromkeys(call for _, call, _ in self._pending.values() if call is not late)
        return "\n".join(
            [
                f"No answer within {getattr(self._limits, late.phase):g} s from {late}.",
                f"Raise cluster.time_limits.{late.phase} if it may take longer.",
                *(f"Also in progress: {other}." for other in calls),
                *self.explainer([process.name for process in late.unanswered]),
                *(line for each in late.unanswered for line in ("", *each.log_tail())),
            ]
        )

    def _collect(self, ready: Sequence[ObjectRef[Any]], *, ends: bool = False) -> list[_Failure]:
        """Reads the results of finished processes, and returns the failures; with `ends`, nothing goes on."""
        failures: list[_Failure] = []
        for ref in ready:
            order, call, index = self._pending.pop(ref)
            try:
                call.read(index)
            except RayError as error:
                failure = _Failure(order=order, call=call, index=index, error=error)
                if isinstance(error, RayActorError) and call.lost is not None and not ends:
                    self._lose(call, _message(failure, []))
                elif isinstance(error, RayTaskError) and isinstance(ray_api.raised(error), call.tolerates or ()):
                    call.errors[index] = _message(failure, [])
                else:
                    failures.append(failure)
            else:
                then = call.then
                done = call.finished and not ends
                if done:
                    call.then = call.lost = call.late = None  # they refer to the call, and would keep its results
                if done and then is not None:
                    then()
        return failures

    def _lose(self, call: Call[Any], cause: str) -> None:
        """Lets a call deal with the loss of its process; raises WorkerError if it cannot."""
        assert call.lost is not None
        lost = call.lost
        call.then = None
        call.lost = None
        call.late = None
        try:
            lost(cause)
        except WorkerError as error:
            self._error = error
            raise

    def _fail(self, failures: list[_Failure]) -> None:
        """Raises the probable cause, after a moment in which the failures that follow from it arrive."""
        if self._pending:
            ready = ray_api.wait(list(self._pending), count=len(self._pending), timeout=_GRACE_S)
            failures = [*failures, *self._collect(ready, ends=True)]
        cause = min(failures, key=_Failure.priority)
        self._error = WorkerError(_message(cause, failures))
        self._error.repeats = ray_api.repeats(cause.error)
        raise self._error from None


def _message(cause: _Failure, failures: Sequence[_Failure]) -> str:
    process = cause.call.processes[cause.index]
    where = f"{process.name} {{}} in {cause.call.label}"
    if isinstance(cause.error, RayTaskError):
        if (complete := ray_api.complete_message(cause.error)) is not None:  # and the same on other ranks
            return printable(f"{where.format('failed')}: {complete}")
        lines = [f"{where.format('failed')}: {ray_api.raised(cause.error)!r}", "", str(cause.error).rstrip()]
    elif ended := ray_api.end_of_ray(cause.error):
        return f"{ended} It was in {cause.call.label}."
    else:
        lines = [f"{where.format('died')}.", "", str(cause.error).rstrip(), "", *process.log_tail()]
    others = sorted({failure.call.processes[failure.index].name for failure in failures} - {process.name})
    if others:
        lines += ["", f"Afterwards, perhaps as a consequence, also failed: {', '.join(others)}."]
    return printable("\n".join(lines))
