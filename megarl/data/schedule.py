"""Schedules: which rank computes which samples in which micro-batch, from ids and lengths alone.

A schedule is one pass: the forward pass over a step's samples, or the forward and backward passes of one optimizer
step. Every DP rank gets the same number of packs (micro-batches), all padded to one length, so that pipelines exchange
tensors of one shape and no rank waits in a collective. Since every pack costs its padded length, the rows of a rank are
balanced over its packs. Each schedule has its own padded length: a long sample affects its own mini-batch only.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from megarl.algos.optimization import divided
from megarl.data.stream import stable_hash
from megarl.types import Layout, PackRow, RankSchedule, SampleInfo, Schedule

Unit = tuple[PackRow, ...]
"""Rows that stay in one pack, in order: one row, or the responses of a preference."""


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
    shares = _balance([_unit(*chunk) for chunk in chunks.values()], layout.dp)
    return _schedule([[(row,) for chunk in share for row in chunk] for share in shares], layout, tokens_per_micro_batch)


def step_schedule(
    samples: Sequence[SampleInfo], layout: Layout, tokens_per_micro_batch: int, *, rows_per_unit: int = 1
) -> Schedule:
    """Plans one optimizer step, or a forward pass with its loss, over all samples; DP ranks get about equal tokens.

    Args:
        tokens_per_micro_batch: maximum tokens of a pack; raised to the longest unit.
        rows_per_unit: neighbouring rows of a chunk that stay in one pack: the responses of a preference.

    Raises:
        ValueError: as for `inference_schedule`; or a unit is incomplete.
    """
    _check(samples, tokens_per_micro_batch)
    units: dict[tuple[int, int], list[SampleInfo]] = defaultdict(list)
    for sample in sorted(samples, key=lambda s: (s.chunk, s.row)):
        units[sample.chunk, sample.row // rows_per_unit].append(sample)
    for members in units.values():
        if len(members) != rows_per_unit:
            raise ValueError(f"sample {members[0].sample_id} is not one of {rows_per_unit} neighbours of its chunk")
    shares = _balance([_unit(*members) for members in units.values()], layout.dp)
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
    """Plans the `epochs * mini_batches` optimizer steps of an update, in order.

    Mini-batches depend on (seed, step, epoch, sample id) alone: not on the layout, the chunks or the order of
    `samples`. The numbers of samples of an epoch's mini-batches differ by at most one, and so do those of DP ranks.

    Args:
        tokens_per_micro_batch: maximum tokens of a pack; raised to the mini-batch's longest sample.

    Raises:
        ValueError: as for `inference_schedule`; no epoch, no mini-batch, or more mini-batches than samples.
    """
    _check(samples, tokens_per_micro_batch)
    if epochs < 1:
        raise ValueError(f"epochs is {epochs}: it must be at least 1")
    most = len({s.conversation for s in samples})
    if not 1 <= mini_batches <= most:
        raise ValueError(f"mini_batches is {mini_batches}: it must be from 1 to the {most} samples of a step")
    schedules: list[Schedule] = []
    for epoch in range(epochs):
        for members in mini_batch_members(samples, mini_batches, seed=seed, step=step, epoch=epoch):
            by_id = sorted(members, key=lambda s: s.sample_id)
            shares = _balance_equal_counts(_branch_units(by_id), layout.dp)
            schedules.append(_schedule(shares, layout, tokens_per_micro_batch))
    return tuple(schedules)


def mini_batch_members(
    samples: Sequence[SampleInfo], mini_batches: int, *, seed: int, step: int, epoch: int
) -> list[Sequence[SampleInfo]]:
    """Returns the samples of each mini-batch, in an order from (seed, step, epoch, sample id) alone.

    The branches of a conversation are in one mini-batch.
    """
    branches: dict[str, list[SampleInfo]] = {}
    for sample in samples:
        branches.setdefault(sample.conversation, []).append(sample)
    ordered = sorted(branches, key=lambda name: (stable_hash(seed, step, epoch, name), name))
    return [[s for name in part for s in branches[name]] for part in divided(ordered, mini_batches)]


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
    if empty := [s.sample_id for s in samples if s.prompt_tokens < 1]:
        raise ValueError(f"sample {empty[0]} has no prompt token: nothing predicts its first response token")


def _unit(*samples: SampleInfo) -> Unit:
    return tuple(
        PackRow(
            chunk=s.chunk,
            row=s.row,
            prompt_tokens=s.prompt_tokens,
            response_tokens=s.response_tokens,
            given_tokens=s.given_tokens,
        )
        for s in samples
    )


def _branch_units(samples: Sequence[SampleInfo]) -> list[Unit]:
    """Returns a unit per sample; branches have the tokens of their conversations."""
    rows = Counter[str]()
    tokens = Counter[str]()
    for sample in samples:
        rows[sample.conversation] += 1
        tokens[sample.conversation] += sample.response_tokens
    units = [_unit(sample) for sample in samples]
    return [
        (replace(unit[0], sequence_tokens=tokens[name]),) if rows[name := sample.conversation] > 1 else unit
        for sample, unit in zip(samples, units, strict=True)
    ]


def _sequences(rows: Iterable[PackRow]) -> int:
    """Returns the number of conversations with a response token."""
    sampled = (row for row in rows if row.response_tokens)
    return round(sum(row.response_tokens / (row.sequence_tokens or row.response_tokens) for row in sampled))


def _tokens(unit: Unit) -> int:
    return sum(row.tokens for row in unit)


def _balance(units: Sequence[Unit], shares: int) -> list[list[Unit]]:
    """Assigns each unit, longest first, to the share with the fewest tokens so far; ties go to the first share."""
    dealt: list[list[Unit]] = [[] for _ in range(shares)]
    loads = [(0, share) for share in range(shares)]
    for unit in sorted(units, key=_tokens, reverse=True):
        load, share = loads[0]
        dealt[share].append(unit)
        heapq.heapreplace(loads, (load + _tokens(unit), share))
    return dealt


def _balance_equal_counts(units: Sequence[Unit], shares: int) -> list[list[Unit]]:
    """Deals units in rounds of one per share, the longest to the share with the fewest tokens."""
    dealt: list[list[Unit]] = [[] for _ in range(shares)]
    loads = [0] * shares
    longest_first = sorted(units, key=_tokens, reverse=True)
    for start in range(0, len(units), shares):
        emptiest_first = sorted(range(shares), key=lambda share: loads[share])
        for unit, share in zip(longest_first[start : start + shares], emptiest_first, strict=False):
            dealt[share].append(unit)
            loads[share] += _tokens(unit)
    return dealt


def _first_fit(units: Sequence[Unit], capacity: int) -> list[list[Unit]]:
    """First-fit decreasing bin packing."""
    packs: list[list[Unit]] = []
    room: list[int] = []
    for unit in sorted(units, key=_tokens, reverse=True):
        index = next((i for i, free in enumerate(room) if free >= _tokens(unit)), len(packs))
        if index == len(packs):
            packs.append([])
            room.append(capacity)
        packs[index].append(unit)
        room[index] -= _tokens(unit)
    return packs


def _pack(shares: Sequence[Sequence[Unit]], capacity: int, multiple: int) -> list[list[list[Unit]]]:
    """Packs the units of every share into the same number of packs, the smallest multiple that fits.

    The packs of a share have about equal tokens unless one would exceed `capacity`; then they are those of `_first_fit`
    and some empty ones.
    """
    fitted = [_first_fit(units, capacity) for units in shares]
    count = -(-max(map(len, fitted)) // multiple) * multiple
    packs: list[list[list[Unit]]] = []
    for units, tight in zip(shares, fitted, strict=True):
        level = _balance(units, count)
        fits = max(sum(map(_tokens, pack)) for pack in level) <= capacity
        packs.append(level if fits else tight + [[] for _ in range(count - len(tight))])
    return packs


def _schedule(shares: Sequence[Sequence[Unit]], layout: Layout, budget: int) -> Schedule:
    """Packs the units of every DP rank under one padded length."""
    units = [unit for share in shares for unit in share]
    ranks = _pack(shares, max(budget, *map(_tokens, units)), multiple=layout.pp if layout.vpp > 1 else 1)
    longest = max(sum(map(_tokens, pack)) for packs in ranks for pack in packs)
    multiple = layout.tp if layout.sequence_parallel else 1
    return Schedule(
        ranks=tuple(
            RankSchedule(
                packs=tuple(tuple(itertools.chain.from_iterable(pack)) for pack in packs),
                pack_tokens=-(-longest // multiple) * multiple,
                total_rows=sum(map(len, units)),
                total_sequences=_sequences(row for unit in units for row in unit),
                total_response_tokens=sum(row.response_tokens for unit in units for row in unit),
                rows_per_unit=len(units[0]),
            )
            for packs in ranks
        )
    )
