"""A role's layout as explicit process groups.

Every role owns a ``ProcessGroupCollection``; Megatron's global ``parallel_state`` stays uninitialised in our
processes, so that a path inside Megatron which still reads it raises, or gets None, instead of mixing up two roles.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megarl.types import Layout

_PARTS = {"dp": ("ep", "expt_dp")}


class GroupCache:
    """Makes process groups of one world, each set of ranks once.

    Roles take turns, so roles whose layouts share a set of ranks share its group. Every rank of the world makes the
    same calls in the same order, as ``torch.distributed.new_group`` demands.

    Args:
        timeout_seconds: after which a group's collectives fail.
    """

    def __init__(self, timeout_seconds: float = 600.0) -> None:
        self._timeout = timedelta(seconds=timeout_seconds)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def get(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        if ranks not in self._groups:
            # On other ranks than these, a stand-in that nothing uses.
            group: Any = dist.new_group(list(ranks), timeout=self._timeout)
            self._groups[ranks] = group
        return self._groups[ranks]

    def mine(self, partition: list[tuple[int, ...]], rank: int) -> dist.ProcessGroup:
        """Makes all groups of a partition of the world and returns the one with ``rank`` in it."""
        groups = {ranks: self.get(ranks) for ranks in partition}
        return next(group for ranks, group in groups.items() if rank in ranks)


def partition(layout: Layout, *together: str) -> list[tuple[int, ...]]:
    """Splits the ranks into sets whose members differ only in the named coordinates.

    Args:
        together: of "tp", "pp", "ep" (which part of the experts) and "expt_dp" (which replica of that part), which
            together are "dp"; none gives sets of one rank, all the whole world.
    """
    apart = {"tp", "pp", "ep", "expt_dp"} - {name for names in together for name in _PARTS.get(names, (names,))}
    sets: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        coords = layout.coords(rank)
        place = {
            "tp": coords.tp,
            "pp": coords.pp,
            "ep": layout.expert_rank(coords),
            "expt_dp": coords.dp // layout.ep,
        }
        sets.setdefault(tuple(place[name] for name in sorted(apart)), []).append(rank)
    return [tuple(ranks) for ranks in sets.values()]


def build_groups(layout: Layout, rank: int, cache: GroupCache) -> ProcessGroupCollection:
    """The process groups of one rank under a layout; collective over the world.

    TP splits the experts as it splits everything else. The context parallel group holds the rank alone. ``embd`` joins
    the first and the last stage, and is None on the stages between, as finalize_model_grads expects.
    """

    def group(*together: str) -> dist.ProcessGroup:
        return cache.mine(partition(layout, *together), rank)

    groups = ProcessGroupCollection(
        tp=group("tp"), pp=group("pp"), dp=group("dp"), mp=group("tp", "pp"), cp=group(), ep=group("ep")
    )
    groups.tp_cp, groups.dp_cp, groups.tp_dp_cp = groups.tp, groups.dp, group("tp", "dp")
    groups.expt_tp, groups.expt_dp = groups.tp, group("expt_dp")
    groups.tp_ep, groups.tp_ep_pp = group("tp", "ep"), group("tp", "ep", "pp")
    groups.intra_dp_cp, groups.intra_expt_dp = groups.dp, groups.expt_dp
    groups.intra_dist_opt = group("tp", "dp", "pp")
    groups.embd = _embedding_group(layout, rank, cache)
    groups.pos_embd = None
    return groups


def _embedding_group(layout: Layout, rank: int, cache: GroupCache) -> dist.ProcessGroup | None:
    ends = [tuple(sorted({ranks[0], ranks[-1]})) for ranks in partition(layout, "pp")]
    made = {ranks: cache.get(ranks) for ranks in ends}
    return next((group for ranks, group in made.items() if rank in ranks), None)
