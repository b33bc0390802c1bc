"""Why calls exceed their time limits: the stacks of all processes, and which of them has not come to the others."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster import ray_api
from megarl.stacks import IN_COLLECTIVE, ProcessStacks, take_stacks, write_stacks

_NODES_S = 60.0
_SHOWN = 8
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
_WORKER = "megarl/cluster/ray_worker.py"
_EVENT = "/asyncio/events.py"  # below what an event loop runs now
_COLLECTIVES = ("/torch/distributed/", "/megatron/core/pipeline_parallel/p2p_communication.py")


@dataclass(frozen=True)
class StackFrame:
    """A frame of a Python stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f'  File "{self.file}", line {self.line} in {self.function}'


def explain(late: Sequence[str], found: Mapping[str, ProcessStacks]) -> list[str]:
    """Says which processes have not come to where the others wait, with the end of the stack of one of them.

    Args:
        late: names of the processes that have not answered a call.
        found: stacks by name.
    """
    silent = {name: found[name].silence if name in found else "there is no such process" for name in late}
    silent = {name: why for name, why in silent.items() if why}
    frames = {name: working_frames(found[name].text) for name in late if name not in silent}
    waiting = {name: own for name, own in frames.items() if _is_in_collective(own)}
    others = [name for name in frames if name not in waiting]
    lines = [f"{name} does not answer a signal: {why}." for name, why in silent.items()]
    if waiting and (others or silent):
        missing = ", ".join([*silent, *others])
        lines.append(f"Not in the collective in which {', '.join(waiting)} wait{'s' * (len(waiting) == 1)}: {missing}.")
        lines += _end_of_stack(next(iter(waiting)), frames)
    elif not silent and (few := _fewest(frames)):
        others = few
    lines += [line for name in others[:1] for line in _end_of_stack(name, frames)]
    return lines + _collectives({name: found[name].waits for name in frames})


def working_frames(text: str) -> list[StackFrame]:
    """Returns the frames of what a process does, a call or a part of its event loop, the innermost first.

    They are empty for a process that waits for work.
    """
    for thread in text.split("\n\n"):
        frames = [StackFrame(file, int(line), name) for file, line, name in _FRAME.findall(thread)]
        ends = [index for index, frame in enumerate(frames) if frame.file.endswith((_WORKER, _EVENT))]
        if ends and ends[0] > 0:
            return frames[: ends[0]]
    return []


def _collectives(waits: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns how far each process is in the groups in which some are in a collective."""
    groups = {line.partition(":")[0] for lines in waits.values() for line in lines if IN_COLLECTIVE in line}
    return [f"{name}, {line}." for name, lines in waits.items() for line in lines if line.partition(":")[0] in groups]


def _is_in_collective(frames: Sequence[StackFrame]) -> bool:
    return any(part in frame.file for frame in frames[:3] for part in _COLLECTIVES)


def _fewest(frames: Mapping[str, Sequence[StackFrame]]) -> list[str]:
    """Returns the processes at the place where the fewest are; of equals the last ones."""
    places: dict[StackFrame | None, list[str]] = defaultdict(list)
    for name, own in frames.items():
        places[own[0] if own else None].append(name)
    return min(reversed(places.values()), key=len) if places else []


def _end_of_stack(name: str, frames: Mapping[str, Sequence[StackFrame]]) -> list[str]:
    if not frames[name]:
        return [f"{name} works on no call."]
    return [f"{name}, the innermost frames first:", *map(str, frames[name][:_SHOWN])]


def report_hang(late: Sequence[str], logs: Path, *, joined: bool) -> list[str]:
    """Writes the stacks of a run's processes; returns what they tell, and where they are; raises nothing.

    Args:
        late: names of the processes that have not answered a call.
        joined: the run may have processes on other nodes.
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
        where = [f"The stacks of all processes are in {write_stacks(found, logs)}."]
    except OSError as error:
        where = [f"The stacks cannot be written: {error}."]
    names = {name.replace(" ", "-"): name for name in late}
    found = sorted(found, key=lambda each: bool(each.silence))  # the last one of a name counts
    by_name = {names.get(each.name, each.name): each for each in found}
    others = [each for name, each in by_name.items() if each.silence and name not in late]
    lines += [f"{each.name} does not answer a signal: {each.silence}." for each in others]
    return [*lines, *explain(late, by_name), *where]


def stacks_of_other_nodes(logs: Path) -> tuple[list[ProcessStacks], list[str]]:
    """Returns the stacks on Ray's other nodes, and the addresses of the nodes that do not answer."""
    own = ray_api.node_address()
    task = ray_api.remote(take_stacks)
    refs = {
        task.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(
            logs
        ): node["NodeManagerAddress"]
        for node in ray_api.living_nodes()
        if node["NodeManagerAddress"] != own
    }
    found: list[ProcessStacks] = []
    for ref in ray_api.wait(list(refs), count=len(refs), timeout=_NODES_S) if refs else ():
        try:
            found += ray_api.get(ref)
        except RayError:
            continue
        del refs[ref]
    return found, sorted(refs.values())
