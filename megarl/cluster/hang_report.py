"""Why calls exceed their time limits: the stacks of all processes, and which of them the others wait for."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster import ray_api
from megarl.stacks import IN_COLLECTIVE, ProcessStacks, take_stacks, write_stacks

_NODES_S = 60.0
_SHOWN = 8
_FRAME = re.compile(r'  File "(.+)", line \d+ in .+')
_WORKER = "megarl/cluster/ray_worker.py"
_EVENT = "/asyncio/events.py"  # below what an event loop runs now
_COLLECTIVES = ("/torch/distributed/", "/megatron/core/pipeline_parallel/p2p_communication.py")


def explain(late: Sequence[str], found: Mapping[str, ProcessStacks]) -> list[str]:
    """Says which processes have not come to where the others wait, with the end of the stack of one of them.

    Args:
        late: names of the processes that have not answered a call.
        found: stacks by name.
    """
    lines: list[str] = []
    silent: list[str] = []
    frames: dict[str, list[str]] = {}
    for name in late:
        why = found[name].silence if name in found else "there is no such process"
        if why:
            silent.append(name)
            lines.append(f"{name} does not answer a signal: {why}.")
        else:
            frames[name] = working_frames(found[name].text)
    waiting = [name for name in frames if _is_in_collective(frames[name])]
    others = [name for name in frames if name not in waiting]
    if waiting and (others or silent):
        verb = "waits" if len(waiting) == 1 else "wait"
        missing = ", ".join([*silent, *others])
        lines.append(f"Not in the collective in which {', '.join(waiting)} {verb}: {missing}.")
        lines += _end_of_stack(waiting[0], frames)
    elif frames and not silent:
        others = _fewest(frames)
    for name in others[:1]:
        lines += _end_of_stack(name, frames)
    return lines + _collectives({name: found[name].waits for name in frames})


def working_frames(text: str) -> list[str]:
    """Returns the frames of what a process does, a call or a part of its event loop, the innermost first.

    They are empty for a process that waits for work.
    """
    for thread in text.split("\n\n"):
        frames: list[str] = []
        for frame in _FRAME.finditer(thread):
            if frame[1].endswith((_WORKER, _EVENT)):
                if frames:
                    return frames
                break
            frames.append(frame[0])
    return []


def _collectives(waits: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns how far each process is in the groups in which some are in a collective."""
    groups: set[str] = set()
    for lines in waits.values():
        groups.update(line.partition(":")[0] for line in lines if IN_COLLECTIVE in line)
    described: list[str] = []
    for name, lines in waits.items():
        described += [f"{name}, {line}." for line in lines if line.partition(":")[0] in groups]
    return described


def _is_in_collective(frames: Sequence[str]) -> bool:
    return any(part in frame for frame in frames[:3] for part in _COLLECTIVES)


def _fewest(frames: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the processes at the place where the fewest are; the last ones of equally many."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, stack in frames.items():
        places[next(iter(stack), "")].append(name)
    return min(reversed(places.values()), key=len)


def _end_of_stack(name: str, frames: Mapping[str, Sequence[str]]) -> list[str]:
    if not frames[name]:
        return [f"{name} works on no call."]
    return [f"{name}, the innermost frames first:", *frames[name][:_SHOWN]]


def report_hang(late: Sequence[str], logs: Path, *, joined: bool) -> list[str]:
    """Writes the stacks of a run's processes; returns what they show, and where they are; raises nothing.

    Args:
        late: names of the processes that have not answered a call.
        joined: whether the run may have processes on other nodes.
    """
    try:
        return _report(late, logs, joined=joined)
    except Exception as error:  # it must not hide what is late
        return [f"The stacks of the processes cannot be taken: {error!r}."]


def _report(late: Sequence[str], logs: Path, *, joined: bool) -> list[str]:
    found = take_stacks(logs)
    unreachable: list[str] = []
    if joined:
        elsewhere, unreachable = stacks_of_other_nodes(logs)
        found += elsewhere
    lines = [f"The node {node} does not answer." for node in unreachable]
    try:
        where = f"The stacks of all processes are in {write_stacks(found, logs)}."
    except OSError as error:
        where = f"The stacks cannot be written: {error}."
    names = {name.replace(" ", "-"): name for name in late}
    by_name: dict[str, ProcessStacks] = {}
    for each in sorted(found, key=lambda each: bool(each.silence)):  # the last one of a name counts
        by_name[names.get(each.name, each.name)] = each
    for name, each in by_name.items():
        if each.silence and name not in late:
            lines.append(f"{each.name} does not answer a signal: {each.silence}.")
    return [*lines, *explain(late, by_name), where]


def stacks_of_other_nodes(logs: Path) -> tuple[list[ProcessStacks], list[str]]:
    """Returns the stacks on Ray's other nodes, and the addresses of the nodes that do not answer."""
    here = ray_api.node_address()
    task = ray_api.untyped.remote(take_stacks)
    addresses: dict[Any, str] = {}
    for node in ray_api.living_nodes():
        address = node["NodeManagerAddress"]
        if address != here:
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            addresses[task.options(num_cpus=0, scheduling_strategy=strategy).remote(logs)] = address
    found: list[ProcessStacks] = []
    if addresses:
        for ref in ray_api.wait(list(addresses), count=len(addresses), timeout=_NODES_S):
            with suppress(RayError):
                found += ray_api.get(ref)
                del addresses[ref]
    return found, sorted(addresses.values())
