"""A run in simulated time: its rollout buffer, with engines and trainers that are as fast as given rates."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from megarl.cluster.calls import Awaited, Condition, Routine
from megarl.loop.rollout_buffer import RolloutBuffer
from megarl.plan.rates import Rates

_STEPS = 24
_RESPONSES = 256
"""Most responses of a step; of larger steps each stands for several."""


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """Seconds per step, and the parts of it in which engines and trainers have nothing to do."""

    seconds: float
    engines_idle: float
    trainers_idle: float


class SimulatedTime:
    """Stands for the monitor of calls: who waits lets time pass, event by event."""

    def __init__(self) -> None:
        self.now = 0.0
        self.listeners: list[Callable[[], None]] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), event))

    def wait_until(self, awaited: Awaited) -> None:
        while not awaited.finished:
            assert self._events, "deadlock: nothing in progress could end the wait"
            self.now, _, event = heapq.heappop(self._events)
            event()
            for listener in self.listeners:
                listener()

    def work(self, seconds: float) -> None:
        """Lets the driver wait for so long."""
        done: list[bool] = []
        self.after(seconds, lambda: done.append(True))
        self.wait_until(Condition(lambda: bool(done)))


class SimulatedEngine:
    """An engine that writes a token of each response in progress at a time; each stands for `weight` responses."""

    def __init__(self, time: SimulatedTime, rates: Rates, weight: float) -> None:
        self._time, self._rates, self._weight = time, rates, weight
        self._ends: list[tuple[float, int, Callable[[], None]]] = []  # by the tokens written then
        self._numbers = itertools.count()
        self._written = self._since = self._busy = 0.0
        self._plan = 0
        self._paused = False

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, tokens: float, done: Callable[[], None]) -> None:
        """Begins a response."""
        self._go_on()
        heapq.heappush(self._ends, (self._written + tokens, next(self._numbers), done))
        self._await_next()

    def pause(self, paused: bool) -> None:
        """Stops all responses for a while, or goes on with them."""
        self._go_on()
        self._paused = paused
        self._await_next()

    @property
    def busy(self) -> float:
        """Returns the seconds with responses in progress so far."""
        self._go_on()
        return self._busy

    @property
    def _token_seconds(self) -> float:
        return self._rates.token + len(self._ends) * self._weight / self._rates.engine

    def _go_on(self) -> None:
        if self._ends and not self._paused:
            passed = self._time.now - self._since
            self._written += passed / self._token_seconds
            self._busy += passed
        self._since = self._time.now

    def _await_next(self) -> None:
        self._plan += 1
        if self._ends and not self._paused:
            seconds = (self._ends[0][0] - self._written) * self._token_seconds
            self._time.after(max(0.0, seconds), partial(self._finish, self._plan))

    def _finish(self, plan: int) -> None:
        if plan != self._plan:  # others have begun since
            return
        self._go_on()
        while self._ends and self._ends[0][0] <= self._written + 1e-6:
            heapq.heappop(self._ends)[2]()
        self._await_next()


class SimulatedRun:
    """Trains with the buffer of a run, for which it stands for sampler, engines and devices.

    Args:
        trainers: devices of the trainers.
        shared: trainers and engines take turns on the same devices.
    """

    def __init__(
        self, rates: Rates, *, engines: int, trainers: int, samples: int, staleness: int, mode: str, shared: bool
    ) -> None:
        self._rates, self._trainers, self._samples, self._staleness = rates, trainers, samples, staleness
        self.monitor, self.shared, self._mode, self._held = SimulatedTime(), shared, mode, False
        self._every = math.ceil(samples / _RESPONSES)
        weight = samples / len(range(0, samples, self._every))
        self._engines = [SimulatedEngine(self.monitor, rates, weight) for _ in range(engines)]
        self._waiting: list[tuple[float, Callable[[], None]]] = []
        config: Any = SimpleNamespace(
            steps=2 * _STEPS + staleness,  # the end, where nothing is left to sample, is not seen
            rollout=SimpleNamespace(max_staleness=staleness, mode=mode),
            data=SimpleNamespace(prompts_per_step=1, samples_per_prompt=1),
        )
        itself: Any = self
        self.buffer = RolloutBuffer(config, itself, itself, itself)

    def estimate(self) -> StepEstimate:
        """Takes steps, of which the first ones, which fill the pipeline, do not count."""
        self.buffer.begin(0)
        first, start, busy, worked = self._staleness + 2, 0.0, 0.0, 0.0
        for step in range(1, first + _STEPS):
            if step == first:
                start, busy, worked = self.monitor.now, self._busy, 0.0
            worked += self.step(step)
        passed = self.monitor.now - start
        return StepEstimate(
            seconds=passed / _STEPS,
            engines_idle=1 - (self._busy - busy) / passed / len(self._engines),
            trainers_idle=1 - worked / passed,
        )

    def step(self, step: int) -> float:
        """Takes a step, and returns the seconds of the trainers' work."""
        taken: Any = self.buffer.take(step)
        self.monitor.work(max(0.0, taken - self.monitor.now))  # until the samples have scores
        seconds = sum(self._lengths(step)) / self._rates.trainer / self._trainers
        self.monitor.work(seconds)
        if not self.buffer.skips_sync(step):
            self.buffer.prepare_sync()
            self._held = True
            if self._mode != "inflight":
                self.monitor.wait_until(Condition(lambda: self.idle))
            for engine in self._engines:
                engine.pause(True)
            self.monitor.work(self._rates.sync)
            for engine in self._engines:
                engine.pause(False)
            self._held = False
            self._assign()
            self.buffer.synced(step)
        return seconds

    @property
    def _busy(self) -> float:
        return sum(engine.busy for engine in self._engines)

    def _lengths(self, step: int) -> list[float]:
        """Returns the lengths of a step's responses, the longest first."""
        lengths = itertools.cycle(self._rates.lengths[step % len(self._rates.lengths)])
        return sorted(itertools.islice(lengths, self._samples), reverse=True)

    def sample(self, step: int) -> Routine[float]:
        """Returns when the samples of a step have scores."""
        lengths = self._lengths(step)[:: self._every]
        left = set(range(len(lengths)))
        self._waiting += [(tokens, partial(left.remove, index)) for index, tokens in enumerate(lengths)]
        self._assign()
        yield Condition(lambda: not left)
        return self.monitor.now + self._rates.score

    def forget(self, step: int) -> None:
        """Does nothing: lengths belong to steps."""

    def to_training(self) -> None:
        """Does nothing: who takes turns is idle meanwhile."""

    def require(self, awaited: Awaited) -> None:
        self.monitor.wait_until(awaited)

    @property
    def idle(self) -> bool:
        return not any(len(engine) for engine in self._engines)

    def _assign(self) -> None:
        while self._waiting and not self._held:
            min(self._engines, key=len).add(*self._waiting.pop(0))
