"""How busy a worker process is, and how much memory it takes in each phase."""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.remote import Phase

_PROCESS = Path("/proc/self")
_RESET_PEAK = "5"
"""What resets the peak of resident memory (proc(5), clear_refs)."""


@dataclass(frozen=True, kw_only=True)
class ProcessUsage:
    """What a process used since the last reading.

    Args:
        idle: fraction of the time in which it ran neither a call nor a step.
        peak_bytes: most memory by phase: allocated by torch on a GPU, or else resident.
        device_name: name of the GPU in torch; empty without one.
    """

    idle: float
    peak_bytes: Mapping[Phase, int]
    device_name: str


class UsageMeter:
    """Measures a process. The memory that it keeps between calls counts for the phase of the call before."""

    def __init__(self) -> None:
        self._phase: Phase = "start"
        self._peaks: dict[Phase, int] = {}
        self._busy = 0.0
        self._since = time.perf_counter()

    def enter(self, phase: Phase) -> None:
        """Notes the phase of the work that follows."""
        if phase != self._phase:
            self._note_peak()
            self._phase = phase

    def add(self, seconds: float) -> None:
        """Counts the duration of a call."""
        self._busy += seconds

    def take(self) -> ProcessUsage:
        """Returns the usage since the last reading, and begins anew."""
        self._note_peak()
        now = time.perf_counter()
        cuda = cuda_in_use()
        device_name = "" if cuda is None else cuda.get_device_name()
        idle = max(0.0, 1 - self._busy / (now - self._since))
        usage = ProcessUsage(idle=idle, peak_bytes=self._peaks, device_name=device_name)
        self._peaks = {}
        self._busy = 0.0
        self._since = now
        return usage

    def _note_peak(self) -> None:
        self._peaks[self._phase] = max(take_peak_memory(), self._peaks.get(self._phase, 0))


def take_peak_memory() -> int:
    """Returns the most bytes that this process has had at once since the last call."""
    cuda = cuda_in_use()
    if cuda is not None:
        peak = cuda.max_memory_allocated()
        cuda.reset_peak_memory_stats()
        return peak
    found = re.search(r"VmHWM:\s+(\d+) kB", (_PROCESS / "status").read_text())
    with suppress(OSError):  # in a sandbox, where it is the peak since the start
        (_PROCESS / "clear_refs").write_text(_RESET_PEAK)
    if found is None:
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return 1024 * int(found[1])


def cuda_in_use() -> Any:
    """Returns torch.cuda if this process uses a GPU, else None; imports nothing."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def memory_metrics(group: str, usages: Sequence[ProcessUsage]) -> dict[str, float]:
    """Returns the most memory of a process of a group in each phase, `memory/PHASE/GROUP`, GiB."""
    peaks: dict[str, int] = {}
    for usage in usages:
        for phase, peak in usage.peak_bytes.items():
            peaks[phase] = max(peak, peaks.get(phase, 0))
    return {f"memory/{phase}/{group}": peak / 2**30 for phase, peak in peaks.items()}
