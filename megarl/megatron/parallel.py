"""A role's layout as explicit process groups.

Every role has a ``ProcessGroupCollection``. Megatron's global ``parallel_state`` stays
uninitialized, so that code of Megatron's that still reads it raises, or gets None, instead of
mixing up two roles.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megarl.stacks import IN_COLLECTIVE
from megarl.types import Layout

_PARTS = {"dp": ("ep", "expt_dp")}


class GroupCache:
    """Makes one process group per set of ranks, which roles share as they run one at a time.

    Every rank of the world makes the same calls in the same order, as
    ``torch.distributed.new_group`` demands. Collectives of a group fail after ``timeout_seconds``.
    """

    def __init__(self, timeout_seconds: float = 600.0) -> None:
        self._timeout = timedelta(seconds=timeout_seconds)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def mine(self, sets: list[tuple[int, ...]], rank: int) -> dist.ProcessGroup | None:
        """Makes the groups of disjoint sets of ranks and returns the rank's, if it has one."""
        mine = None
        for ranks in sets:
            if ranks not in self._groups:
                name = f"ranks {', '.join(map(str, ranks))}"
                # Unused where the rank is not a member.
                group: Any = dist.new_group(list(ranks), timeout=self._timeout, group_desc=name)
                self._groups[ranks] = group
            if rank in ranks:
                mine = self._groups[ranks]
        return mine


def partition(layout: Layout, *together: str) -> list[tuple[int, ...]]:
    """Splits the ranks into sets whose members differ only in the named coordinates.

    These are "tp", "pp", "dp", and its parts "ep" (part of the experts) and "expt_dp" (replica of
    that part); without names, every rank is alone.
    """
    sets: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in range(layout.world_size):
        coords = layout.coords(rank)
        place = {
            "tp": coords.tp,
            "pp": coords.pp,
            "ep": layout.expert_rank(coords),
            "expt_dp": coords.dp // layout.ep,
        }
        for name in together:
            for part in _PARTS.get(name, (name,)):
                del place[part]
        sets[tuple(place.values())].append(rank)
    return [tuple(ranks) for ranks in sets.values()]


def build_groups(layout: Layout, rank: int, cache: GroupCache) -> ProcessGroupCollection:
    """Returns the process groups of a rank under a layout; collective over the world.

    Experts are split over TP like everything else. The context parallel group is the rank alone.
    ``embd`` is the first and the last stage, and None between them, as Megatron expects.
    """

    def group(*together: str) -> dist.ProcessGroup | None:
        return cache.mine(partition(layout, *together), rank)

    groups = ProcessGroupCollection(
        tp=group("tp"), pp=group("pp"), dp=group("dp"), mp=group("tp", "pp"), cp=group(), ep=group("ep")
    )
    groups.tp_cp = groups.tp
    groups.dp_cp = groups.dp
    groups.tp_dp_cp = group("tp", "dp")
    groups.expt_tp = groups.tp
    groups.expt_dp = group("expt_dp")
    groups.tp_ep = group("tp", "ep")
    groups.tp_ep_pp = group("tp", "ep", "pp")
    groups.intra_dp_cp = groups.dp
    groups.intra_expt_dp = groups.expt_dp
    groups.intra_dist_opt = group("tp", "dp", "pp")
    ends = [tuple(sorted({ranks[0], ranks[-1]})) for ranks in partition(layout, "pp")]
    groups.embd = cache.mine(ends, rank)
    groups.pos_embd = None
    return groups


def barrier() -> None:
    """Waits for all ranks of the world."""
    if dist.get_backend() == "nccl":
        dist.barrier(device_ids=[0])  # each rank sees one; NCCL would guess, and warn
    else:
        dist.barrier()


def collectives() -> list[str]:
    """Returns a line per process group of this rank: its collectives, and where it is.

    torch's flight recorder has them, for Gloo without sends and receives; its build for CUDA has
    another one for NCCL.
    """
    recorders: Any = torch._C._distributed_c10d
    lines: list[str] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(recorders, name, None)
        if dump is not None:
            lines += recorded(json.loads(dump()), time.time_ns())
    return lines


def recorded(trace: Mapping[str, Any], now_ns: int) -> Iterator[str]:
    """Yields the lines of a dump of the flight recorder, the last group used first."""
    groups: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for entry in reversed(trace.get("entries", ())):  # torch leaves out what is empty
        groups[entry["pg_id"]].append(entry)
    for number, entries in groups.items():
        name, description = entries[0]["process_group"]
        status = trace.get("pg_status", {}).get(str(number), {})
        begun = max(0, int(status.get("last_enqueued_collective", 0)))
        finished = max(0, int(status.get("last_completed_collective", 0)))
        line = f"{description or name or f'group {number}'}: {begun} collectives begun, {finished} finished"
        current: list[str] = []
        for entry in entries:
            if not entry["retired"] and entry["state"] != "completed":
                seconds = (now_ns - entry["time_created_ns"]) / 1e9
                current.append(f"{entry['profiling_name']} {entry['input_sizes']} for {seconds:.1f} s")
        if current:
            line += f"{IN_COLLECTIVE}{', '.join(current)}"
        yield line
