"""Calls of reward functions in a child process, several at a time where a function allows it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from megarl.config.schema import RewardFunction
from megarl.errors import RunError
from megarl.rewards.adapters import CallMode, Failure, Reply
from megarl.rewards.child_process import ChildProcess
from megarl.rewards.completion import Completion

_CANCEL_S = 5.0
"""Time for a late coroutine to be canceled; then the process is killed, as the coroutine blocks its loop."""
_ONE_BY_ONE = CallMode(concurrency=1, is_async=False)


class FunctionProcess(ChildProcess):
    """A child process that calls reward functions; calls refer to them by index."""

    def __init__(self, functions: Sequence[RewardFunction], memory: int | None = None) -> None:
        super().__init__("megarl.rewards.reward_child", tuple(functions), "reward functions", memory)

    @property
    def modes(self) -> tuple[CallMode, ...]:
        """The functions' modes; empty until they are loaded."""
        return self.loaded or ()


@dataclass(frozen=True, kw_only=True)
class FunctionCall:
    """A call of the function with this index on some completions."""

    function: int
    completions: Sequence[Completion]


@dataclass
class _Lane:
    """Numbers of calls that share a limit of calls in progress."""

    mode: CallMode
    waiting: deque[int] = field(default_factory=deque[int])
    busy: int = 0


@dataclass(frozen=True, kw_only=True)
class _Sent:
    """A call in progress: its lane, and when it must have ended, on `time.monotonic`."""

    lane: _Lane
    seconds: float
    until: float


class CallQueue:
    """Makes calls until each has scores, or its tries or the time are used up.

    Sequential functions are called first, one call at a time, in order. The others' calls overlap.
    If the process ends or must be ended with several calls in progress, those that were past their
    limit, or all if it ended by itself, have failed and are repeated one at a time; the others are
    made again, and the try does not count.

    Args:
        time_limit: seconds that a call may take.
        retries: further tries of a call that failed.
        deadline: end of all calls, on `time.monotonic`.
    """

    def __init__(
        self,
        process: FunctionProcess,
        calls: Sequence[FunctionCall],
        *,
        time_limit: float,
        retries: int,
        deadline: float,
    ) -> None:
        self._process = process
        self._calls = calls
        self._time_limit = time_limit
        self._retries = retries
        self._deadline = deadline
        late = Failure(kind="deadline", reason="no time was left of cluster.time_limits.scoring")
        self._replies: list[Sequence[Reply]] = [[late] * len(call.completions) for call in calls]
        self._tries = [0] * len(calls)
        self._sent: dict[int, _Sent] = {}
        self._alone: deque[tuple[int, _Lane]] = deque()
        self._process_reads = True

    def run(self) -> list[tuple[Sequence[Reply], int]]:
        """Makes all calls; returns for each a reply per completion, failures being the last ones, and its tries."""
        if not self._process.modes:
            with suppress(RunError):  # every call fails by it
                self._process.start(self._deadline)
        first = _Lane(_ONE_BY_ONE)
        others = dict[int, _Lane]()
        modes = self._process.modes
        for number, call in enumerate(self._calls):
            lane = first
            if modes and not modes[call.function].sequential:
                lane = others.setdefault(call.function, _Lane(modes[call.function]))
            lane.waiting.append(number)
        self._run([first])
        self._run(list(others.values()))
        return list(zip(self._replies, self._tries, strict=True))

    def _run(self, lanes: Sequence[_Lane]) -> None:
        while time.monotonic() < self._deadline or self._sent:
            for lane in lanes:
                while lane.waiting and lane.busy < lane.mode.concurrency and self._may_send():
                    self._send(lane.waiting.popleft(), lane)
            if not self._sent and self._alone:
                self._send(*self._alone.popleft())
            if self._sent:
                self._receive()
            elif not self._alone and not any(lane.waiting for lane in lanes):
                return
        self._alone.clear()

    def _may_send(self) -> bool:
        return self._process_reads and time.monotonic() < self._deadline

    def _send(self, number: int, lane: _Lane) -> None:
        """Sends a call to the process, which is started if it does not run."""
        call = self._calls[number]
        self._tries[number] += 1
        lane.busy += 1
        try:
            if not self._sent:
                self._process.start(self._deadline)
        except RunError as error:
            self._sent[number] = _Sent(lane=lane, seconds=0.0, until=0.0)
            self._settle(number, Failure(kind="no process", reason=str(error)))
            return
        seconds = min(self._time_limit, max(self._deadline - time.monotonic(), 0.0))
        patience = seconds + (_CANCEL_S if lane.mode.is_async else 0.0)
        until = min(time.monotonic() + patience, self._deadline)
        self._sent[number] = _Sent(lane=lane, seconds=seconds, until=until)
        try:
            self._process.send((number, call.function, call.completions, seconds), until - time.monotonic())
        except OSError:  # the process has ended or hangs, which is noticed when its answers are received
            self._process_reads = False

    def _receive(self) -> None:
        """Waits for an answer; ends the process if a call is past its limit."""
        until = min(sent.until for sent in self._sent.values())
        failures: dict[int, Failure] = {}
        try:
            if self._process.connection.poll(max(until - time.monotonic(), 0.0)):
                self._settle(*self._process.connection.recv())
                return
        except (EOFError, OSError):
            reason = f"its process ended by {self._process.close()}"
            failures = dict.fromkeys(self._sent, Failure(kind="end", reason=reason))
        else:
            now = time.monotonic()
            self._process.close()
            for number, sent in self._sent.items():
                if sent.until <= now:
                    reason = f"it took longer than {sent.seconds:g} s, and was ended"
                    failures[number] = Failure(kind="time", reason=reason)
        self._stopped(failures)

    def _stopped(self, failures: Mapping[int, Failure]) -> None:
        """Settles the calls in progress when the process has ended; those that did not fail wait again."""
        self._process_reads = True
        several = len(self._sent) > 1
        for number in reversed(list(self._sent)):
            if number in failures:
                self._settle(number, failures[number], alone=several)
            else:
                lane = self._sent.pop(number).lane
                lane.busy -= 1
                lane.waiting.appendleft(number)
                self._tries[number] -= 1

    def _settle(self, number: int, replies: Sequence[Reply] | Failure, *, alone: bool = False) -> None:
        """Keeps the replies to a call; a failed one waits for its next try, the first or `alone`."""
        lane = self._sent.pop(number).lane
        lane.busy -= 1
        if isinstance(replies, Failure):
            replies = [replies] * len(self._calls[number].completions)
        self._replies[number] = replies
        failed = all(isinstance(reply, Failure) for reply in replies)
        if failed and self._tries[number] <= self._retries:
            if alone:
                self._alone.appendleft((number, lane))
            else:
                lane.waiting.appendleft(number)
