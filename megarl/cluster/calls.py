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
from typing import Any, Literal

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from megarl.cluster.ray_worker import ChunkRefs
from megarl.config.schema import TimeLimits
from megarl.errors import RunError

Phase = Literal["start", "rollout", "scoring", "inference", "update", "sync", "checkpoint"]
"""What a call is part of: a field of the configuration's time limits."""

_GRACE_S = 4.0
"""For the news of a death, which may come after the failures that it causes."""
_LOG_TAIL_BYTES = 4000


class WorkerError(RunError):
    """A process of the run failed, died or did not answer in time; the message names it, the call and the cause."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process of the run: its name for messages, the handle of its shell, and where it prints."""

    name: str
    actor: Any
    log_file: Path


@dataclass(eq=False, kw_only=True)
class Call:
    """A method call on some processes, in progress.

    Args:
        label: what was called, for messages.
        phase: that it is part of.
        processes: that run it.
        done: one reference per process, to its small result.
        watch: of the session.
        chunks: references to the results by chunk.
        streams: of a call that yields pairs, by process: what has come so far.
        results: the small results that are there, by process.
        seconds: that these processes took; not of streams.
    """

    label: str
    phase: Phase
    processes: Sequence[Process]
    done: Sequence[ray.ObjectRef]
    watch: Watch
    chunks: ChunkRefs[Any] = field(default_factory=lambda: ChunkRefs({}))
    streams: Sequence[ray.ObjectRefGenerator] = ()
    results: dict[int, Any] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)

    def wait(self) -> list[Any]:
        """The small results, by process.

        Consumes nothing else; waits for this call, and is woken by the failure of any call of the session.

        Raises:
            WorkerError: a process failed or exceeded its time, in this call or another.
        """
        self.watch.wait_for(self)
        return [self.results[index] for index in range(len(self.done))]

    def read(self, index: int) -> Any:
        """What a process that has finished has returned; of a stream, pairs of something small and a reference.

        Raises:
            RayError: it has failed.
        """
        done = ray.get(self.done[index])
        if not self.streams:
            self.seconds[index] = done.seconds
            return done.result
        refs = list(self.streams[index])
        return list(zip(ray.get(refs[::2]), refs[1::2], strict=True))  # a failure comes in place of something small

    def longest(self) -> float:
        """Waits for the call; the seconds of the process that took most of them.

        Raises:
            WorkerError: a process failed or exceeded its time, in this call or another.
        """
        self.wait()
        return max(self.seconds.values())

    @property
    def unanswered(self) -> list[Process]:
        """The processes that have not finished."""
        return [process for index, process in enumerate(self.processes) if index not in self.results]


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """One process's failure in one call; sorts before those that it may have caused."""

    order: int
    call: Call
    index: int
    error: RayError

    def rank(self) -> tuple[bool, int, int]:
        """Deaths first, as they break the connections of the others; then in order of submission."""
        return not isinstance(self.error, RayActorError), self.order, self.index


class Watch:
    """Every call of a session that is in progress.

    The oldest of them is timed, from the moment at which the driver waits for it: an earlier call may be what a later
    one waits for, so that every call has the whole limit of its phase.

    Args:
        limits: of the phases, seconds.
    """

    def __init__(self, limits: TimeLimits) -> None:
        self._limits = limits
        self._pending: dict[ray.ObjectRef, tuple[int, Call, int]] = {}
        self._submitted = 0
        self._timed: Call | None = None
        self._since = 0.0

    def submit(
        self,
        label: str,
        phase: Phase,
        method: str,
        processes: Sequence[Process],
        args: Sequence[tuple[Any, ...]],
        chunks: Sequence[Sequence[int]] | None = None,
    ) -> Call:
        """Calls a method on every process and returns at once.

        Args:
            label: for messages, such as ``actor.update``.
            phase: that the call is part of.
            method: of the class in the shells.
            processes: to call.
            args: the arguments for each.
            chunks: the chunks that each one reports; None where the results are small.
        """
        done: list[ray.ObjectRef] = []
        by_chunk: dict[int, ray.ObjectRef] = {}
        for index, process in enumerate(processes):
            if chunks is None:
                done.append(process.actor.run.remote(method, args[index]))
                continue
            own = chunks[index]
            refs = process.actor.run_by_chunk.options(num_returns=1 + len(own)).remote(method, args[index], own)
            first, *rest = refs if own else [refs]
            by_chunk.update(zip(own, rest, strict=True))
            done.append(first)
        columns = ChunkRefs[Any](by_chunk)
        return self.follow(Call(label=label, phase=phase, processes=processes, done=done, chunks=columns, watch=self))

    def stream(
        self, label: str, phase: Phase, method: str, processes: Sequence[Process], args: tuple[Any, ...]
    ) -> Call:
        """Calls a method that yields pairs on every process, with the same arguments, and returns at once.

        Its results are lists of pairs, in the order in which they were yielded: something small, and a reference to
        what stays where it was made, which the driver owns. The other arguments are those of ``submit``.
        """
        streams = [
            process.actor.run_stream.options(num_returns="streaming").remote(method, args) for process in processes
        ]
        done = [stream.completed() for stream in streams]
        return self.follow(Call(label=label, phase=phase, processes=processes, done=done, streams=streams, watch=self))

    def follow(self, call: Call) -> Call:
        """Watches a call that was submitted already."""
        self._pending.update({ref: (self._submitted, call, index) for index, ref in enumerate(call.done)})
        self._submitted += 1
        return call

    def wait_for(self, call: Call) -> None:
        """Waits until every process has finished the call.

        Raises:
            WorkerError: a process failed or exceeded its time, in this call or another.
        """
        while len(call.results) < len(call.done):
            ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=self._time_left())
            if not ready:
                raise WorkerError(self._overdue())
            # All that is there at once: each look goes through every call in progress.
            ready, _ = ray.wait(list(self._pending), num_returns=len(self._pending), timeout=0)
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

    def _collect(self, ready: Sequence[ray.ObjectRef]) -> list[_Failure]:
        """Takes the results that are there, and returns the failures."""
        failures: list[_Failure] = []
        for ref in ready:
            order, call, index = self._pending.pop(ref)
            try:
                call.results[index] = call.read(index)
            except RayError as error:
                failures.append(_Failure(order=order, call=call, index=index, error=error))
        return failures

    def _fail(self, failures: list[_Failure]) -> None:
        """Raises the cause among the failures of the next moment: one failure soon brings others with it."""
        if self._pending:
            ready, _ = ray.wait(list(self._pending), num_returns=len(self._pending), timeout=_GRACE_S)
            failures = [*failures, *self._collect(ready)]
        cause = min(failures, key=_Failure.rank)
        raise WorkerError(_message(cause, failures)) from None


def _names(processes: Sequence[Process]) -> str:
    return ", ".join(process.name for process in processes)


def _message(cause: _Failure, failures: Sequence[_Failure]) -> str:
    process = cause.call.processes[cause.index]
    where = f"{process.name} {{}} in {cause.call.label}"
    if isinstance(cause.error, RayTaskError) and isinstance(cause.error.cause, RunError):
        return f"{where.format('failed')}: {cause.error.cause}"  # all that there is to say; the others say the same
    if isinstance(cause.error, RayTaskError):
        lines = [f"{where.format('failed')}: {cause.error.cause!r}", "", str(cause.error).rstrip()]
    else:
        lines = [f"{where.format('died')}.", "", str(cause.error).rstrip(), "", *_last_words(process)]
    others = sorted({failure.call.processes[failure.index].name for failure in failures} - {process.name})
    if others:
        lines += ["", f"After it, or because of it, also failed: {', '.join(others)}."]
    return "\n".join(lines)


def _last_words(process: Process) -> list[str]:
    """The end of what a process printed."""
    if not process.log_file.exists():
        return []
    text = process.log_file.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").rstrip()
    return [f"The end of {process.log_file}:", text] if text else []
