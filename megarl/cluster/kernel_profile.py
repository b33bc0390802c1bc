"""What a process computes in each kind of call, by torch's profiler."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from megarl.cluster.process_usage import cuda_in_use
from megarl.remote import Phase

PYTHON: Final = "(outside of operators)"


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """A kernel in the calls of a kind; on a CPU an operator without those that it calls, or `PYTHON`."""

    name: str
    calls: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class CallProfile:
    """The calls of a kind.

    Args:
        name: `phase.method`.
        seconds: from the start to the end of each call.
        kernels: the longest first.
    """

    name: str
    seconds: float
    kernels: Sequence[KernelTime]


class ProfiledEvent(Protocol):
    """What is read of `torch.autograd.profiler_util.FunctionEvent`; times are microseconds."""

    name: str
    time_range: Any
    is_user_annotation: bool | None
    is_async: bool

    @property
    def device_type(self) -> Any: ...
    @property
    def self_cpu_time_total(self) -> float: ...


class KernelProfiler:
    """Profiles the calls of a process, all in the same thread. Without `switch` it does nothing."""

    def __init__(self) -> None:
        self._profiler: Any = None
        self._names: set[str] = set()
        self._on_device = False

    def switch(self, trace: str | None) -> Sequence[CallProfile]:
        """Begins to profile; with the file of a trace for Perfetto, ends it, writes this, and returns the kernels."""
        if trace is None:
            self._start()
            return ()
        return self._stop(trace)

    def _start(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it notes each start and stop
        from torch.profiler import ProfilerActivity, profile

        self._on_device = cuda_in_use() is not None
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_device else [])]
        self._profiler = profile(activities=activities)
        self._profiler.start()

    @contextmanager
    def call(self, phase: Phase, method: str) -> Generator[None]:
        """Surrounds a call."""
        if self._profiler is None:
            yield
            return
        from torch.profiler import record_function

        name = f"{phase}.{method}"
        self._names.add(name)
        with record_function(name):
            yield

    def _stop(self, trace: str) -> list[CallProfile]:
        profiler = self._profiler
        self._profiler = None
        profiler.stop()
        profiler.export_chrome_trace(trace)
        return by_call(profiler.events(), self._names, on_device=self._on_device)


def by_call(events: Iterable[ProfiledEvent], names: set[str], *, on_device: bool) -> list[CallProfile]:
    """Adds up kernels by the name of the call in which they began; those of no call are left out.

    Args:
        names: of the annotations that are calls, which do not overlap.
        on_device: count what ran on the device, instead of operators on the CPU. A call ends after its kernels, as it
            reads their results.
    """
    events = [event for event in events if not event.is_async]
    calls = [event for event in events if event.name in names and event.is_user_annotation and _on_cpu(event)]
    calls.sort(key=lambda call: call.time_range.start)
    starts = [call.time_range.start for call in calls]
    seconds = dict.fromkeys(names, 0.0)
    found = {name: dict[str, tuple[int, float]]() for name in names}
    for call in calls:
        seconds[call.name] += call.time_range.elapsed_us() / 1e6
    for event in events:
        index = bisect_right(starts, event.time_range.start) - 1
        if _on_cpu(event) is on_device or index < 0 or event.time_range.start > calls[index].time_range.end:
            continue
        if on_device and event.is_user_annotation:
            continue
        name = PYTHON if event is calls[index] else event.name
        spent = event.time_range.elapsed_us() if on_device else event.self_cpu_time_total
        count, before = found[calls[index].name].get(name, (0, 0.0))
        found[calls[index].name][name] = (count + 1, before + spent / 1e6)
    return [
        CallProfile(name=name, seconds=seconds[name], kernels=longest_first(found[name]))
        for name in sorted(names, key=lambda name: -seconds[name])
        if seconds[name]
    ]


def longest_first(kernels: dict[str, tuple[int, float]]) -> list[KernelTime]:
    """Returns kernels, given as (calls, seconds) by name."""
    times = [KernelTime(name=name, calls=calls, seconds=spent) for name, (calls, spent) in kernels.items()]
    return sorted(times, key=lambda kernel: -kernel.seconds)


def _on_cpu(event: ProfiledEvent) -> bool:
    return event.device_type.name == "CPU"
