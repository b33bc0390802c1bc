"""Calls on processes. They are watched together, because one process that fails or hangs blocks the others.

Calls are made and awaited within `CallMonitor.run`. It ends with the first failure of any call,
whose peers may wait in a collective forever, and with an error where a call exceeds
the time limit of its phase.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from ray import ObjectRef
from ray.exceptions import RayActorError, RayTaskError

from megarl.cluster import ray_api
from megarl.cluster.ray_worker import ChunkRefs, Timed
from megarl.cluster.spans import Span
from megarl.config.schema import TimeLimits
from megarl.errors import RunError
from megarl.remote import Phase
from megarl.texts import printable

_GRACE_S = 4.0
"""Wait for the report of a death, which may arrive after the failures that it causes."""


class WorkerError(RunError):
    """A process failed, died or did not answer in time; the message names the process, the call and the cause."""

    repeats = False
    """Whether new processes would fail in the same way; see `ray_api.repeats`."""


class ProcessLostError(WorkerError):
    """The process of a call that survives its loss has died or exceeded the time limit."""


@dataclass(frozen=True, kw_only=True)
class Process[W_co]:
    """A process with an object of class W; `actor` is the handle of its `RayWorker`.

    Args:
        concurrent: whether a call runs beside earlier ones.
        numbers: numbers of its calls, in their order.
    """

    name: str
    actor: Any
    log_file: Path
    concurrent: bool = False
    numbers: Iterator[int] = field(default_factory=itertools.count, compare=False)

    def log_tail(self) -> list[str]:
        """Returns a heading and the end of the log; nothing of an empty one."""
        if not self.log_file.exists():
            return []
        end = printable(self.log_file.read_bytes()[-4000:].decode(errors="replace")).rstrip()
        if not end:
            return []
        return [f"The end of {self.log_file}:", end]


@dataclass(eq=False, kw_only=True)
class Call[R]:
    """A method call on some processes; awaiting it returns their results, except those of tolerated errors.

    Args:
        label: name of the call in messages.
        done: a reference per process to the result for the driver.
        results: results that have arrived, by index of the process.
        seconds: durations of the method, by index of the process.
        survives_loss: whether awaiting the call raises ProcessLostError when a process has died or
            exceeded the time limit; otherwise that ends the run.
        late: function that gets the message when processes exceed the time limit, and returns
            whether all of them get another limit.
        tolerates: kind of errors that end the call of one process only, as messages in `errors`.
        errors: messages of tolerated errors, by index of the process.
        after: calls whose results the processes wait for; the time limit begins when
            they have ended.
        beside: an earlier call whose processes these meet; both time limits begin together.
        order: position in the order of submission.
    """

    label: str
    phase: Phase
    processes: Sequence[Process[Any]]
    done: Sequence[ObjectRef[Any]]
    monitor: CallMonitor
    results: dict[int, R] = field(default_factory=dict[int, R])
    seconds: dict[int, float] = field(default_factory=dict[int, float])
    survives_loss: bool = False
    late: Callable[[str], bool] | None = None
    tolerates: type[RunError] | None = None
    errors: dict[int, str] = field(default_factory=dict[int, str])
    after: Sequence[Call[Any]] = ()
    beside: Call[Any] | None = None
    order: int = field(default=0, init=False)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the time limit has begun."""
    ended: asyncio.Future[None] = field(init=False)
    earlier: Sequence[asyncio.Future[None]] = field(default=(), init=False)
    """The ends of the last calls that its processes had before."""
    late_at: float | None = field(default=None, init=False)
    """When the time limit ends, by the clock of the loop; None before it has begun."""

    def __await__(self) -> Generator[Any, None, list[R]]:
        yield from asyncio.shield(self.ended).__await__()
        return [self.results[index] for index in sorted(self.results)]

    @property
    def finished(self) -> bool:
        """Returns whether all processes have answered."""
        return len(self.results) + len(self.errors) == len(self.done)

    async def longest(self) -> float:
        """Waits for the call, and returns the seconds of the slowest process."""
        await self
        return max(self.seconds.values())

    def restart_limit(self) -> None:
        """Begins the time limit again, if it has begun."""
        if self.late_at is not None:
            self.late_at = asyncio.get_running_loop().time() + self.monitor.limit_of(self)

    @property
    def unanswered(self) -> list[Process[Any]]:
        """Returns the processes that have not finished."""
        answered = self.results.keys() | self.errors.keys()
        return [process for index, process in enumerate(self.processes) if index not in answered]

    def __str__(self) -> str:
        names = ", ".join(process.name for process in self.unanswered)
        return f"{names} in {self.label}"


@dataclass(eq=False, kw_only=True)
class ChunkCall[S, T](Call[S]):
    """A call whose results by chunk, of type T, stay in the object store; other results go to the driver."""

    chunks: ChunkRefs[T]


async def gather_by_chunk[T](call: Call[dict[int, T] | None]) -> dict[int, T]:
    """Waits for results by chunk, and joins those of the reporting ranks."""
    joined: dict[int, T] = {}
    for result in await call:
        joined |= result or {}
    return joined


async def rank0_result[R](call: Call[R | None]) -> R:
    """Waits for a call, and returns the result of its first reporting rank; other ranks return the same or None."""
    for result in await call:
        if result is not None:
            return result
    raise AssertionError(f"{call.label}: no rank reports")


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """The failure of a process in a call."""

    call: Call[Any]
    index: int
    error: BaseException

    @property
    def process(self) -> Process[Any]:
        return self.call.processes[self.index]

    def priority(self) -> tuple[bool, int, int]:
        """Returns the sort key: the probable cause first. A death comes first, as it breaks connections of others."""
        return not isinstance(self.error, RayActorError), self.call.order, self.index

    def message(self, failures: Sequence[_Failure] = ()) -> str:
        """Describes this failure, and names the processes of other failures, which may follow from it."""
        name = self.process.name
        label = self.call.label
        cause = str(self.error).rstrip()
        if isinstance(self.error, RayTaskError):
            complete = ray_api.complete_message(self.error)
            if complete is not None:  # other ranks have the same
                return printable(f"{name} failed in {label}: {complete}")
            lines = [f"{name} failed in {label}: {ray_api.raised(self.error)!r}", "", cause]
        else:
            ended = ray_api.end_of_ray(self.error)
            if ended:
                return f"{ended} It was in {label}."
            lines = [f"{name} died in {label}.", "", cause, "", *self.process.log_tail()]
        others = {failure.process.name for failure in failures} - {name}
        if others:
            lines += ["", f"Afterwards, perhaps as a consequence, also failed: {', '.join(sorted(others))}."]
        return printable("\n".join(lines))


class CallMonitor:
    """Watches the calls of a session.

    The time limit of a call begins when all its processes have finished their earlier calls, as
    those that are ready may wait for the others, and when the calls that it waits for have ended.
    """

    def __init__(self, limits: TimeLimits) -> None:
        self._limits = limits
        self._calls: dict[Call[Any], None] = {}  # in progress, in the order of submission
        self._orders = itertools.count()
        self._last: dict[str, asyncio.Future[None]] = {}  # the end of the last call of each process
        self._failures: list[_Failure] = []
        self._all_answered = asyncio.Event()
        self._error: WorkerError | None = None
        self._group: asyncio.TaskGroup | None = None
        self._spawned: set[asyncio.Task[Any]] = set()
        self.explainer: Callable[[Sequence[str]], Sequence[str]] = lambda late: ()
        """Called with the names of the processes that exceed a time limit; says what they do."""
        self.observer: Callable[[str, str, Sequence[Span]], None] | None = None
        """Called with a process, its group or role, and what it has done; processes return that with each result."""

    async def run[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Runs work that makes calls to its end, and ends the background work with it.

        Raises:
            WorkerError: A process failed or exceeded a time limit, in any call.
        """
        if self._error is not None:
            work.close()
            raise self._error
        error: BaseException
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                await self._resume()
                result = await work
                for task in self._spawned:
                    task.cancel()
                return result
        except BaseExceptionGroup as errors:
            error = errors
        finally:
            self._group = None
            work.close()  # it has not begun if a failure came after the end of an earlier run
        raise _first(error)

    async def _resume(self) -> None:
        """Takes over from an earlier run: calls in progress, and failures that came after its end."""
        for call in self._calls:
            self.spawn(self._watch(call))
        if self._failures:
            await self._fail()

    def spawn[T](self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts work beside that of `run`, which its error ends."""
        assert self._group is not None, "calls are made within run"
        try:
            task = self._group.create_task(work)
        except RuntimeError:  # an error is ending the run
            work.close()
            raise
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)
        return task

    def follow[C: Call[Any]](self, call: C) -> C:
        """Watches a submitted call, and returns it; attributes that the caller sets at once are respected."""
        loop = asyncio.get_running_loop()
        call.ended = loop.create_future()
        if not call.done:
            call.ended.set_result(None)
            return call
        call.order = next(self._orders)
        self._calls[call] = None
        self._all_answered.clear()
        earlier: list[asyncio.Future[None]] = []
        for index, (process, ref) in enumerate(zip(call.processes, call.done, strict=True)):
            end = None
            if not process.concurrent:
                if process.name in self._last:
                    earlier.append(self._last[process.name])
                end = loop.create_future()
                self._last[process.name] = end
            ray_api.when_done(ref, loop, partial(self._arrived, call, index, end))
        call.earlier = earlier
        self.spawn(self._watch(call))
        return call

    def limit_of(self, call: Call[Any]) -> float:
        """Returns the time limit of a call, seconds."""
        return getattr(self._limits, call.phase)

    def starts(self, process: Process[Any]) -> bool:
        """Returns whether a process is still starting."""
        return any(call.phase == "start" and process in call.unanswered for call in self._calls)

    def in_progress(self) -> list[str]:
        """Returns a line per call in progress, with the seconds of its time limit; works in any thread."""
        lines: list[str] = []
        for call in list(self._calls):
            limit = self.limit_of(call)
            end = call.late_at
            waited = "its limit has not begun"
            if end is not None:
                waited = f"{limit - end + time.monotonic():.0f} of {limit:g} s"
            lines.append(f"{call}: {waited}")
        return lines

    async def _watch(self, call: Call[Any]) -> None:
        """Waits for the end of a call, and deals with its time limit."""
        await asyncio.sleep(0)  # the caller sets the attributes of the call
        waited = [*call.earlier, *(other.ended for other in call.after)]
        if waited:
            await asyncio.wait(waited)
        if call.beside is not None:
            await call.beside.begun.wait()
        call.begun.set()
        clock = asyncio.get_running_loop().time
        call.late_at = clock() + self.limit_of(call)
        while not call.ended.done():
            left = call.late_at - clock()
            if left > 0:
                await asyncio.wait([call.ended], timeout=left)
            else:
                self._expire(call)
                call.late_at = clock() + self.limit_of(call)

    def _expire(self, call: Call[Any]) -> None:
        """Deals with a call that exceeds its time; raises WorkerError unless it gets another limit or survives."""
        count = len(call.done)
        if self._failures or len(ray_api.wait(call.done, count=count, timeout=0)) == count:
            return  # what came while this process was busy is not late
        message = self._overdue(call)
        if call.late is not None and call.late(message):
            return
        if not call.survives_loss:
            raise WorkerError(message)
        self._lose(call, message)

    def _overdue(self, late: Call[Any]) -> str:
        """Returns the message for a call that exceeds its time; another call may be the cause."""
        lines = [
            f"No answer within {self.limit_of(late):g} s from {late}.",
            f"Raise cluster.time_limits.{late.phase} if it may take longer.",
        ]
        lines += [f"Also in progress: {other}." for other in self._calls if other is not late]
        lines += self.explainer([process.name for process in late.unanswered])
        for process in late.unanswered:
            lines += ["", *process.log_tail()]
        return "\n".join(lines)

    def _arrived(self, call: Call[Any], index: int, end: asyncio.Future[None] | None, done: Future[Timed[Any]]) -> None:
        """Takes the answer of a process. When a failure ends the run, no call ends any more."""
        if end is not None and not end.done():
            end.set_result(None)
        if call not in self._calls:  # it was lost
            return
        error = done.exception()
        if error is None:
            answer = done.result()
            call.results[index] = answer.result
            call.seconds[index] = answer.seconds
            if self.observer is not None:
                group = call.label.partition(".")[0]
                self.observer(call.processes[index].name, group, answer.spans)
        else:
            failure = _Failure(call=call, index=index, error=error)
            if isinstance(error, RayTaskError) and isinstance(ray_api.raised(error), call.tolerates or ()):
                call.errors[index] = failure.message()
            elif isinstance(error, RayActorError) and call.survives_loss and not self._failures:
                self._lose(call, failure.message())
                return
            else:
                call.errors[index] = ""  # the process has answered; the message is that of the run
                self._failures.append(failure)
                if len(self._failures) == 1 and self._group is not None:
                    with suppress(RuntimeError):  # the run ends already
                        self.spawn(self._fail())
        if call.finished:
            self._forget(call)
            if not self._failures:
                call.ended.set_result(None)

    def _forget(self, call: Call[Any]) -> None:
        del self._calls[call]
        if not self._calls:
            self._all_answered.set()

    def _lose(self, call: Call[Any], cause: str) -> None:
        """Ends a call that survives the loss of its process."""
        self._forget(call)
        call.ended.set_exception(ProcessLostError(cause))
        call.ended.exception()  # nobody may wait for it

    async def _fail(self) -> None:
        """Raises the probable cause, after a moment in which the failures that follow from it arrive."""
        if self._calls:
            with suppress(TimeoutError):
                async with asyncio.timeout(_GRACE_S):
                    await self._all_answered.wait()
        cause = min(self._failures, key=_Failure.priority)
        self._error = WorkerError(cause.message(self._failures))
        self._error.repeats = ray_api.repeats(cause.error)
        raise self._error


def _first(error: BaseException) -> BaseException:
    """Returns the first error of groups."""
    while isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        error = group.exceptions[0]
    return error
