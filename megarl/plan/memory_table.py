"""The tables of a run's memory plan."""

from __future__ import annotations

from itertools import groupby

from rich.console import Console
from rich.table import Table

from megarl.config import RunConfig
from megarl.files import format_bytes
from megarl.preflight.capacity import capacity
from megarl.preflight.device_memory import advice
from megarl.preflight.memory_plan import PhaseMemory, plan_memory

_ROWS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "logits": "logits and output head",
    "stepping": "optimizer temporaries",
    "weights": "engine's weights",
    "cache": "KV cache",
    "engine": "engine workspace and CUDA graphs",
    "buckets": "buckets",
    "snapshot": "checkpoint's copy",
    "process": "processes",
    "peak": "peak",
    "offloaded": "on the host",
}
_KEY_WIDTH = 22

Phases = tuple[PhaseMemory, ...]


def print_memory(config: RunConfig, console: Console | None = None) -> None:
    """Prints the memory of each device in each phase, and what would help where it may not fit."""
    out = console or Console(highlight=False)
    room = capacity(config)
    peaks = 0
    offloaded = 0
    worries = list[str]()
    devices = [(plan, tuple(plan.phases())) for plan in plan_memory(config)]
    for phases, same in groupby(devices, key=lambda entry: entry[1]):
        members = [plan for plan, _ in same]
        first = members[0].device
        last = members[-1].device
        name = f"device {first}" if first == last else f"devices {first}-{last}"
        out.print(_table(f"{name}, GiB", phases))
        out.print()
        peaks += len(members) * _largest(phases, "peak")
        offloaded += len(members) * _largest(phases, "offloaded")
        for phase in phases:
            if phase.peak > room.nbytes:
                fix = advice(config, members[0], phase, excess=phase.peak - room.nbytes)
                worries.append(f"{phase.phase} on {name} may not fit, {format_bytes(phase.peak)}: {fix}")
    lines = [f"{format_bytes(room.nbytes)} ({room.source})"]
    if room.shared:
        lines[0] += f"; at most {format_bytes(peaks)} on all virtual devices together"
    elif offloaded:
        lines[0] += f" on each device; at most {format_bytes(offloaded)} on the hosts"
        lines[0] += " for offloaded roles and checkpoints"
    for line in (*lines, *worries):
        out.print(f"{'memory':14}{line}", soft_wrap=True, markup=False)


def _table(title: str, phases: Phases) -> Table:
    table = Table(box=None)
    table.add_column(title, min_width=_KEY_WIDTH, no_wrap=True)
    for phase in phases:
        table.add_column(phase.phase, justify="right")
    table.add_row("", *(phase.role or "" for phase in phases))
    for name, text in _ROWS.items():
        if _largest(phases, name):
            sizes = [getattr(phase, name) for phase in phases]
            table.add_row(text, *(f"{size / 2**30:.2f}" if size else "" for size in sizes))
    return table


def _largest(phases: Phases, name: str) -> int:
    return max((getattr(phase, name) for phase in phases), default=0)
