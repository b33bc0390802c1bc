"""Who computes which samples in which micro-batch, planned from ids and lengths alone.

A schedule is one pass: the forward pass over a step's samples, or the forward and backward passes of one optimizer
step. It gives every DP rank the same number of packs (micro-batches), all of one padded length: pipelines then exchange
tensors of one shape, and no rank waits in a collective for another's surplus pack. As every pack costs its padded
length, the rows of a rank are levelled over its packs, so that the longest pack, and with it the padding of all, is
short. Schedules have nothing to do with each other: one long sample lengthens the packs of its own mini-batch alone.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

from megarl.data.hashing import stable_hash
from megarl.types import Layout, PackRow, RankSchedule, SampleInfo, Schedule

Pack = list[PackRow]
T = TypeVar("T")


def inference_schedule(samples: Sequence[SampleInfo], layout: Layout, tokens_per_micro_batch: int) -> Schedule:
    """Plans a forward pass over all samples; a DP rank gets whole chunks, so that it returns whole columns.

    Args:
        samples: all samples of the step.
        layout: of the role that computes.
        tokens_per_micro_batch: most tokens in a pack; those of the longest sample where that is more.

    Raises:
        ValueError: no samples, a sample twice, a sample without a prompt, or a budget below one token.
    """
    _check(samples, tokens_per_micro_batch)
    chunks: dict[int, list[SampleInfo]] = defaultdict(list)
    for sample in sorted(samples, key=lambda s: (s.chunk, s.row)):
        chunks[sample.chunk].append(sample)
    shares = _spread(list(chunks.values()), layout.dp, cost=lambda chunk: sum(s.tokens for s in chunk))
    rows = [[_row(sample) for chunk in share for sample in chunk] for share in shares]
    return _schedule(rows, layout, tokens_per_micro_batch)


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
    """Plans the optimizer steps of an update: ``epochs * mini_batches`` schedules, in order.

    Which samples make which mini-batch depends on (seed, step, epoch, sample id) and on nothing else: not on the
    layout, the chunks or the order of ``samples``. The numbers of samples in the mini-batches of an epoch differ by at
    most one, as do those of the DP ranks in a mini-batch. Each schedule has a padded length of its own.

    Args:
        samples: all samples of the step.
        layout: of the role that trains.
        tokens_per_micro_batch: most tokens in a pack; those of the mini-batch's longest sample where that is more.
        mini_batches: optimizer steps in an epoch.
        epochs: passes over the samples.
        seed: of the run.
        step: of the loop.

    Raises:
        ValueError: as for inference_schedule; no epoch, no mini-batch, or more mini-batches than samples.
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
            longest_first = sorted(members, key=lambda s: (-s.tokens, s.sample_id))
            rows = [[_row(s) for s in share] for share in _deal(longest_first, layout.dp)]
            schedules.append(_schedule(rows, layout, tokens_per_micro_batch))
    return tuple(schedules)


def mini_batch_members(
    samples: Sequence[SampleInfo], mini_batches: int, *, seed: int, step: int, epoch: int
) -> list[list[SampleInfo]]:
    """The samples of each mini-batch of an epoch, in an order that depends on (seed, step, epoch, sample id) alone."""
    ordered = sorted(samples, key=lambda s: (stable_hash(seed, step, epoch, s.sample_id), s.sample_id))
    bounds = [len(ordered) * i // mini_batches for i in range(mini_batches + 1)]
    return [ordered[start:stop] for start, stop in itertools.pairwise(bounds)]


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


def _row(sample: SampleInfo) -> PackRow:
    return PackRow(
        chunk=sample.chunk,
        row=sample.row,
        prompt_tokens=sample.prompt_tokens,
        response_tokens=sample.response_tokens,
    )


def _spread(items: Sequence[T], shares: int, cost: Callable[[T], int]) -> list[list[T]]:
    """Gives each item, the dearest first, to the share that costs least so far; ties go to the first share."""
    spread: list[list[T]] = [[] for _ in range(shares)]
    loads = [(0, share) for share in range(shares)]
    for item in sorted(items, key=cost, reverse=True):
        load, share = loads[0]
        spread[share].append(item)
        heapq.heapreplace(loads, (load + cost(item), share))
    return spread


def _deal(longest_first: Sequence[SampleInfo], shares: int) -> list[list[SampleInfo]]:
    """Deals samples in rounds, one to every share, the longest of a round to the share with the fewest tokens."""
    dealt: list[list[SampleInfo]] = [[] for _ in range(shares)]
    loads = [0] * shares
    for start in range(0, len(longest_first), shares):
        emptiest_first = sorted(range(shares), key=lambda share: loads[share])
        for sample, share in zip(longest_first[start : start + shares], emptiest_first, strict=False):
            dealt[share].append(sample)
            loads[share] += sample.tokens
    return dealt


def _schedule(rows_of_ranks: Sequence[Sequence[PackRow]], layout: Layout, budget: int) -> Schedule:
    """Packs the rows of every DP rank under one padded length."""
    longest_row = max(row.tokens for rows in rows_of_ranks for row in rows)
    ranks = _pack_ranks(rows_of_ranks, layout, capacity=max(budget, longest_row))
    longest_pack = max(_tokens(pack) for packs in ranks for pack in packs)
    unit = layout.tp if layout.sequence_parallel else 1
    pack_tokens = -(-longest_pack // unit) * unit
    return Schedule(
        ranks=tuple(
            RankSchedule(
                packs=tuple(map(tuple, packs)),
                pack_tokens=pack_tokens,
                total_rows=sum(map(len, rows_of_ranks)),
                total_response_tokens=sum(row.response_tokens for rows in rows_of_ranks for row in rows),
            )
            for packs in ranks
        )
    )


def _pack_ranks(rows_of_ranks: Sequence[Sequence[PackRow]], layout: Layout, capacity: int) -> list[list[Pack]]:
    """Packs the rows of every DP rank into one number of packs, of at most ``capacity`` tokens each."""
    fitted = [_first_fit(rows, capacity) for rows in rows_of_ranks]
    unit = layout.pp if layout.vpp > 1 else 1
    count = -(-max(map(len, fitted)) // unit) * unit
    packed: list[list[Pack]] = []
    for rows, tight in zip(rows_of_ranks, fitted, strict=True):
        level = _spread(rows, count, cost=lambda row: row.tokens)
        fits = max(map(_tokens, level)) <= capacity
        packed.append(level if fits else tight + [[] for _ in range(count - len(tight))])
    return packed


def _first_fit(rows: Sequence[PackRow], capacity: int) -> list[Pack]:
    """First-fit decreasing: the longest row first, each into the first pack that has room."""
    packs: list[Pack] = []
    room: list[int] = []
    for row in sorted(rows, key=lambda r: r.tokens, reverse=True):
        index = next((i for i, free in enumerate(room) if free >= row.tokens), len(packs))
        if index == len(packs):
            packs.append([])
            room.append(capacity)
        packs[index].append(row)
        room[index] -= row.tokens
    return packs


def _tokens(pack: Sequence[PackRow]) -> int:
    return sum(row.tokens for row in pack)
