"""What a process computes in each kind of call, by torch's profiler."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

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


class KernelProfiler:
    """Profiles the calls of a process, which run in one thread, after `switch` has begun it."""

    def __init__(self) -> None:
        self._profiler: Any = None
        self._names: set[str] = set()
        self._on_device = False

    def switch(self, trace: str | None) -> Sequence[CallProfile]:
        """Begins a profile; with the file of a trace for Perfetto, writes that instead, and returns the kernels."""
        if trace is not None:
            profiler = self._profiler
            self._profiler = None
            profiler.stop()
            profiler.export_chrome_trace(trace)
            return by_call(profiler.events(), self._names, on_device=self._on_device)
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it logs each start and stop
        from torch.profiler import ProfilerActivity, profile

        self._on_device = cuda_in_use() is not None
        activities = [ProfilerActivity.CPU]
        if self._on_device:
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities)
        self._profiler.start()
        return ()

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


def by_call(events: Iterable[Any], names: set[str], *, on_device: bool) -> list[CallProfile]:
    """Adds up kernels by the name of the call in which they began; those of no call are left out.

    Args:
        events: events of torch's profiler, `torch.autograd.profiler_util.FunctionEvent`.
        names: names of the annotations that are calls, which do not overlap.
        on_device: whether to count what ran on the device, instead of operators on the CPU. A call
            ends after its kernels, as it reads their results.
    """
    events = [event for event in events if not event.is_async]
    calls = [event for event in events if event.name in names and event.is_user_annotation and _on_cpu(event)]
    calls.sort(key=lambda call: call.time_range.start)
    starts = [call.time_range.start for call in calls]
    seconds: defaultdict[str, float] = defaultdict(float)
    for call in calls:
        seconds[call.name] += call.time_range.elapsed_us() / 1e6
    taken: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        index = bisect_right(starts, event.time_range.start) - 1
        if _on_cpu(event) is on_device or index < 0 or event.time_range.start > calls[index].time_range.end:
            continue
        if on_device and event.is_user_annotation:
            continue
        call = calls[index]
        kernel = PYTHON if event is call else event.name
        microseconds = event.time_range.elapsed_us() if on_device else event.self_cpu_time_total
        taken[call.name][kernel].append(microseconds / 1e6)
    profiles: list[CallProfile] = []
    for name, total in seconds.items():
        if total > 0:
            kernels: list[KernelTime] = []
            for kernel, times in taken[name].items():
                kernels.append(KernelTime(name=kernel, calls=len(times), seconds=sum(times)))
            kernels.sort(key=lambda kernel: -kernel.seconds)
            profiles.append(CallProfile(name=name, seconds=total, kernels=kernels))
    return sorted(profiles, key=lambda profile: -profile.seconds)


def _on_cpu(event: Any) -> bool:
    return event.device_type.name == "CPU"
