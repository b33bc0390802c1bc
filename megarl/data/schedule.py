"""Schedules: which rank computes which samples in which micro-batch, from ids and lengths alone.

An item stays together: one row, or the rows of a preference. Its cost is its tokens.

A schedule is one pass: the forward pass over a step's samples, or the forward and backward passes of one optimizer
step. Every DP rank gets the same number of packs (micro-batches), all of one padded length, so that pipelines exchange
tensors of one shape and no rank waits in a collective. Since every pack costs its padded length, the rows of a rank are
balanced over its packs. Each schedule has its own padded length: one long sample affects its own mini-batch alone.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from megarl.algos.optimization import divided
from megarl.data.stream import stable_hash
from megarl.types import Layout, PackRow, RankSchedule, SampleInfo, Schedule

T = TypeVar("T")


def spread(items: Sequence[T], shares: int, cost: Callable[[T], int]) -> list[list[T]]:
    """Assigns each item, largest first, to the share with the lowest cost so far; ties go to the first share."""
    dealt: list[list[T]] = [[] for _ in range(shares)]
    loads = [(0, share) for share in range(shares)]
    for item in sorted(items, key=cost, reverse=True):
        load, share = loads[0]
        dealt[share].append(item)
        heapq.heapreplace(loads, (load + cost(item), share))
    return dealt


def deal(items: Sequence[T], shares: int, cost: Callable[[T], int]) -> list[list[T]]:
    """Deals items in rounds of one per share, largest first to the lowest cost; share sizes differ by at most one."""
    dealt: list[list[T]] = [[] for _ in range(shares)]
    loads = [0] * shares
    dearest_first = sorted(items, key=cost, reverse=True)
    for start in range(0, len(items), shares):
        emptiest_first = sorted(range(shares), key=lambda share: loads[share])
        for item, share in zip(dearest_first[start : start + shares], emptiest_first, strict=False):
            dealt[share].append(item)
            loads[share] += cost(item)
    return dealt


def packed(shares: Sequence[Sequence[T]], unit: int, capacity: int, cost: Callable[[T], int]) -> list[list[list[T]]]:
    """Packs the items of every share into the same number of packs.

    Args:
        shares: items, none larger than ``capacity``.
        unit: the number of packs is the smallest multiple of this that fits.
        capacity: maximum cost of a pack.

    Returns:
        Packs by share; some are empty where another share needs more.
    """
    fitted = [_first_fit(items, capacity, cost) for items in shares]
    count = -(-max(map(len, fitted)) // unit) * unit
    return [_levelled(items, tight, count, capacity, cost) for items, tight in zip(shares, fitted, strict=True)]


def _levelled(
    items: Sequence[T], tight: list[list[T]], count: int, capacity: int, cost: Callable[[T], int]
) -> list[list[T]]:
    """Returns ``count`` packs of about equal cost, or the tight and some empty packs where one would overflow."""
    level = spread(items, count, cost)
    if max(sum(map(cost, pack)) for pack in level) <= capacity:
        return level
    return tight + [[] for _ in range(count - len(tight))]


def _first_fit(items: Sequence[T], capacity: int, cost: Callable[[T], int]) -> list[list[T]]:
    """First-fit decreasing bin packing."""
    packs: list[list[T]] = []
    room: list[int] = []
    for item in sorted(items, key=cost, reverse=True):
        index = next((i for i, free in enumerate(room) if free >= cost(item)), len(packs))
        if index == len(packs):
            packs.append([])
            room.append(capacity)
        packs[index].append(item)
        room[index] -= cost(item)
    return packs


Unit = tuple[PackRow, ...]
"""Rows that stay together, in order."""


def inference_schedule(samples: Sequence[SampleInfo], layout: Layout, tokens_per_micro_batch: int) -> Schedule:
    """Plans a forward pass over all samples; a DP rank gets whole chunks, so that it returns whole columns.

    Args:
        tokens_per_micro_batch: maximum tokens of a pack; raised to the longest sample.

    Raises:
        ValueError: no samples, a repeated sample, a sample without a prompt, or a budget below one token.
    """
    _check(samples, tokens_per_micro_batch)
    chunks: dict[int, list[SampleInfo]] = defaultdict(list)
    for sample in sorted(samples, key=lambda s: (s.chunk, s.row)):
        chunks[sample.chunk].append(sample)
    shares = spread(list(chunks.values()), layout.dp, cost=lambda chunk: sum(s.tokens for s in chunk))
    units = [[_unit(sample) for chunk in share for sample in chunk] for share in shares]
    return _schedule(units, layout, tokens_per_micro_batch)


def step_schedule(
    samples: Sequence[SampleInfo], layout: Layout, tokens_per_micro_batch: int, *, rows_per_unit: int = 1
) -> Schedule:
    """Plans one optimizer step, or a forward pass with its loss, over all samples; DP ranks get equal tokens.

    Args:
        tokens_per_micro_batch: maximum tokens of a pack; raised to the longest unit.
        rows_per_unit: neighbouring rows of a chunk that stay in one pack in order: the responses of a preference.

    Raises:
        ValueError: as of ``inference_schedule``; or a unit is incomplete.
    """
    _check(samples, tokens_per_micro_batch)
    units: dict[tuple[int, int], list[SampleInfo]] = defaultdict(list)
    for sample in sorted(samples, key=lambda s: (s.chunk, s.row)):
        units[sample.chunk, sample.row // rows_per_unit].append(sample)
    for members in units.values():
        if len(members) != rows_per_unit:
            raise ValueError(f"sample {members[0].sample_id} is not one of {rows_per_unit} neighbours of its chunk")
    shares = spread([_unit(*members) for members in units.values()], layout.dp, cost=_tokens)
    return _schedule(shares, layout, tokens_per_micro_batch)


def update_schedules(
    samples: Sequence[SampleInfo],
    layout: Layout,
    tokens_per_micro_batch: int,
    *,
    mini_batches: int,
    epochs: int,
    seed: int,
    step: int,
) -> tuple[Schedule, ...]:
    """Plans the ``epochs * mini_batches`` optimizer steps of an update, in order.

    Mini-batches depend on (seed, step, epoch, sample id) alone: not on the layout, the chunks or the order of
    ``samples``. The numbers of samples in the mini-batches of an epoch differ by at most one, and so do those of the DP
    ranks.

    Args:
        tokens_per_micro_batch: maximum tokens of a pack; raised to the mini-batch's longest sample.
        step: of the loop.

    Raises:
        ValueError: as of ``inference_schedule``; no epoch, no mini-batch, or more mini-batches than samples.
    """
    _check(samples, tokens_per_micro_batch)
    if epochs < 1:
        raise ValueError(f"epochs is {epochs}: it must be at least 1")
    if not 1 <= mini_batches <= len(samples):
        raise ValueError(
            f"mini_batches is {mini_batches}: it must lie between 1 and the {len(samples)} samples of a step"
        )
    schedules: list[Schedule] = []
    for epoch in range(epochs):
        for members in mini_batch_members(samples, mini_batches, seed=seed, step=step, epoch=epoch):
            by_name = sorted(members, key=lambda s: s.sample_id)
            shares = deal([_unit(s) for s in by_name], layout.dp, cost=_tokens)
            schedules.append(_schedule(shares, layout, tokens_per_micro_batch))
    return tuple(schedules)


def mini_batch_members(
    samples: Sequence[SampleInfo], mini_batches: int, *, seed: int, step: int, epoch: int
) -> list[list[SampleInfo]]:
    """Returns the samples of each mini-batch, in an order from (seed, step, epoch, sample id) alone."""
    ordered = sorted(samples, key=lambda s: (stable_hash(seed, step, epoch, s.sample_id), s.sample_id))
    return [list(members) for members in divided(ordered, mini_batches)]


def under_one_length(one: Schedule, other: Schedule) -> tuple[Schedule, Schedule]:
    """Gives two passes of one optimizer step the same pack length: pipelines exchange tensors of one shape."""
    pack_tokens = max(rank.pack_tokens for schedule in (one, other) for rank in schedule.ranks)

    def lengthened(schedule: Schedule) -> Schedule:
        return Schedule(ranks=tuple(replace(rank, pack_tokens=pack_tokens) for rank in schedule.ranks))

    return lengthened(one), lengthened(other)


def _check(samples: Sequence[SampleInfo], tokens_per_micro_batch: int) -> None:
    if not samples:
        raise ValueError("there are no samples to schedule")
    if tokens_per_micro_batch < 1:
        raise ValueError(f"tokens_per_micro_batch is {tokens_per_micro_batch}: it must be at least 1")
    if len({s.sample_id for s in samples}) != len(samples) or len({(s.chunk, s.row) for s in samples}) != len(samples):
        raise ValueError("a sample is listed twice: sample ids, and (chunk, row) pairs, must be unique in a step")
    for sample in samples:
        if sample.prompt_tokens < 1:
            raise ValueError(
                f"sample {sample.sample_id} has no prompt token: nothing predicts its first response token"
            )


def _unit(*samples: SampleInfo) -> Unit:
    return tuple(
        PackRow(chunk=s.chunk, row=s.row, prompt_tokens=s.prompt_tokens, response_tokens=s.response_tokens)
        for s in samples
    )


def _tokens(unit: Unit) -> int:
    return sum(row.tokens for row in unit)


def _schedule(shares: Sequence[Sequence[Unit]], layout: Layout, budget: int) -> Schedule:
    """Packs the units of every DP rank under one padded length."""
    units = [unit for share in shares for unit in share]
    ranks = packed(
        shares, unit=layout.pp if layout.vpp > 1 else 1, capacity=max(budget, *map(_tokens, units)), cost=_tokens
    )
    longest_pack = max(sum(map(_tokens, pack)) for packs in ranks for pack in packs)
    multiple = layout.tp if layout.sequence_parallel else 1
    return Schedule(
        ranks=tuple(
            RankSchedule(
                packs=tuple(tuple(itertools.chain.from_iterable(pack)) for pack in packs),
                pack_tokens=-(-longest_pack // multiple) * multiple,
                total_rows=sum(map(len, units)),
                total_sequences=sum(row.response_tokens > 0 for unit in units for row in unit),
                total_response_tokens=sum(row.response_tokens for unit in units for row in unit),
                rows_per_unit=len(units[0]),
            )
            for packs in ranks
        )
    )
