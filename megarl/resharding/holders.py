"""Ranks of trainers and engines as holders of a model's weights."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.garbage_collection import collector_paused
from megarl.models import ModelSpec
from megarl.types import HeadName, Layout
from megarl.weights.plan import TransferPlan
from megarl.weights.planner import Holder, plan
from megarl.weights.shard_map import ShardMap
from megarl.weights.topology import Place


def trainer_holders(
    spec: ModelSpec,
    layout: Layout,
    places: Sequence[Place],
    *,
    head: HeadName = "lm",
    first: int = 0,
) -> list[Holder]:
    """Returns a Megatron role's ranks, from ``first`` on; raises ValueError if the layout does not fit."""
    maps: dict[tuple[int, int, int], ShardMap] = {}
    holders: list[Holder] = []
    for rank, place in zip(range(layout.world_size), places, strict=True):
        coords = layout.coords(rank)
        part = coords.tp, coords.pp, layout.expert_rank(coords)
        if part not in maps:
            maps[part] = spec.megatron_map(layout, rank, head)
        holders.append(Holder(rank=first + rank, map=maps[part], node=place.node, device=place.device))
    return holders


def engine_holders(spec: ModelSpec, tp: int, places: Sequence[Place], *, first: int = 0) -> list[Holder]:
    """Returns vLLM engines' ranks, one by one, from ``first`` on; raises ValueError if TP does not fit."""
    maps = [spec.vllm_map(tp, rank) for rank in range(tp)]
    holders: list[Holder] = []
    for index, place in enumerate(places):
        holder = Holder(rank=first + index, map=maps[index % tp], node=place.node, device=place.device)
        holders.append(holder)
    return holders


@collector_paused()
def plan_sync(
    spec: ModelSpec,
    layout: Layout,
    trainers: Sequence[Place],
    tp: int,
    engines: Sequence[Place],
    bucket_bytes: int,
) -> TransferPlan:
    """Plans the transfer of a trainer's weights to engines; the trainer's ranks are the first.

    Raises ValueError, with every reason, if the layout or the engines' TP does not fit the model.
    """
    sources = trainer_holders(spec, layout, trainers)
    return plan(sources, engine_holders(spec, tp, engines, first=layout.world_size), bucket_bytes)
