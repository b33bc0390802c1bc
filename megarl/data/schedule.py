"""Schedules: which rank computes which samples in which micro-batch, from ids and lengths alone.

A schedule is one pass: the forward pass over a step's samples, or the forward and backward passes
of one optimizer step. Every DP rank gets the same number of packs (micro-batches), all padded to
one length, so that pipelines exchange tensors of one shape and no rank waits in a collective. Since
every pack costs its padded length, the rows of a rank are balanced over its packs. Each schedule
has its own padded length: a long sample affects its own mini-batch only.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from megarl.algos.optimization import divided
from megarl.data.stream import stable_hash
from megarl.types import Layout, PackRow, RankSchedule, SampleInfo, Schedule

Unit = tuple[PackRow, ...]
"""Rows that stay in one pack, in order: one row, or the responses of a preference."""


def inference_schedule(samples: Sequence[SampleInfo], layout: Layout, tokens_per_micro_batch: int) -> Schedule:
    """Plans a forward pass over all samples; a DP rank gets whole chunks and returns whole columns.

    Args:
        tokens_per_micro_batch: maximum tokens of a pack; raised to the longest sample.
    """
    chunks: dict[int, list[PackRow]] = defaultdict(list)
    for sample in _in_order(samples):
        chunks[sample.chunk].append(_row(sample))
    shares: list[list[Unit]] = []
    for share in _balance(list(map(tuple, chunks.values())), layout.dp):
        rows = itertools.chain.from_iterable(share)
        shares.append([(row,) for row in rows])
    return _schedule(shares, layout, tokens_per_micro_batch)


def step_schedule(
    samples: Sequence[SampleInfo], layout: Layout, tokens_per_micro_batch: int, *, rows_per_unit: int = 1
) -> Schedule:
    """Plans one optimizer step, or a forward pass with its loss; DP ranks get about equal tokens.

    Args:
        tokens_per_micro_batch: maximum tokens of a pack; raised to the longest unit.
        rows_per_unit: number of neighboring rows of a chunk that stay in one
            pack: the responses of a preference.
    """
    members: dict[tuple[int, int], list[SampleInfo]] = defaultdict(list)
    for sample in _in_order(samples):
        members[sample.chunk, sample.row // rows_per_unit].append(sample)
    units: list[Unit] = []
    for neighbors in members.values():
        assert len(neighbors) == rows_per_unit, f"a neighbor of {neighbors[0].sample_id} is missing"
        units.append(tuple(map(_row, neighbors)))
    return _schedule(_balance(units, layout.dp), layout, tokens_per_micro_batch)


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

    Mini-batches depend on (seed, step, epoch, sample id) alone: not on the layout, the chunks or
    the order of `samples`. The numbers of samples of an epoch's mini-batches differ by at most one,
    and so do those of DP ranks.

    Args:
        mini_batches: number of mini-batches, from 1 to that of conversations.
        tokens_per_micro_batch: maximum tokens of a pack; raised to the mini-batch's longest sample.
    """
    schedules: list[Schedule] = []
    for epoch in range(epochs):
        for members in mini_batch_members(samples, mini_batches, seed=seed, step=step, epoch=epoch):
            by_id = sorted(members, key=lambda sample: sample.sample_id)
            shares = _balance_equal_counts(_branch_units(by_id), layout.dp)
            schedules.append(_schedule(shares, layout, tokens_per_micro_batch))
    return tuple(schedules)


def mini_batch_members(
    samples: Sequence[SampleInfo], mini_batches: int, *, seed: int, step: int, epoch: int
) -> list[Sequence[SampleInfo]]:
    """Returns the samples of each mini-batch, in an order by (seed, step, epoch, sample id).

    The branches of a conversation are in one mini-batch.
    """
    branches: dict[str, list[SampleInfo]] = {}
    for sample in samples:
        branches.setdefault(sample.conversation, []).append(sample)
    ordered = sorted(branches, key=lambda name: (stable_hash(seed, step, epoch, name), name))
    members: list[Sequence[SampleInfo]] = []
    for names in divided(ordered, mini_batches):
        chosen = [branches[name] for name in names]
        members.append(list(itertools.chain.from_iterable(chosen)))
    return members


def under_one_length(one: Schedule, other: Schedule) -> tuple[Schedule, Schedule]:
    """Gives two passes of one optimizer step one pack length, as pipelines exchange one shape."""
    pack_tokens = max(rank.pack_tokens for rank in (*one.ranks, *other.ranks))

    def lengthened(schedule: Schedule) -> Schedule:
        return Schedule(ranks=tuple(replace(rank, pack_tokens=pack_tokens) for rank in schedule.ranks))

    return lengthened(one), lengthened(other)


def _in_order(samples: Sequence[SampleInfo]) -> list[SampleInfo]:
    return sorted(samples, key=lambda sample: (sample.chunk, sample.row))


def _row(sample: SampleInfo) -> PackRow:
    return PackRow(
        chunk=sample.chunk,
        row=sample.row,
        prompt_tokens=sample.prompt_tokens,
        response_tokens=sample.response_tokens,
        given_tokens=sample.given_tokens,
        teacher=sample.teacher,
    )


def _branch_units(samples: Sequence[SampleInfo]) -> list[Unit]:
    """Returns a unit per sample, with the tokens of its conversation."""
    tokens = Counter[str]()
    for sample in samples:
        tokens[sample.conversation] += sample.response_tokens
    return [(replace(_row(sample), sequence_tokens=tokens[sample.conversation]),) for sample in samples]


def _tokens(unit: Unit) -> int:
    return sum(row.tokens for row in unit)


def _balance(units: Sequence[Unit], shares: int) -> list[list[Unit]]:
    """Assigns units, longest first, to the share with the fewest tokens; ties go to the first."""
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
        emptiest_first = sorted(range(shares), key=loads.__getitem__)
        for unit, share in zip(longest_first[start : start + shares], emptiest_first, strict=False):
            dealt[share].append(unit)
            loads[share] += _tokens(unit)
    return dealt


def _first_fit(units: Sequence[Unit], capacity: int) -> list[list[Unit]]:
    """First-fit decreasing bin packing."""
    packs: list[list[Unit]] = []
    room: list[int] = []
    for unit in sorted(units, key=_tokens, reverse=True):
        index = 0
        while index < len(packs) and room[index] < _tokens(unit):
            index += 1
        if index == len(packs):
            packs.append([])
            room.append(capacity)
        packs[index].append(unit)
        room[index] -= _tokens(unit)
    return packs


def _pack(shares: Sequence[Sequence[Unit]], capacity: int, multiple: int) -> list[list[Unit]]:
    """Packs the units of every share into equally many packs, the smallest multiple that fits.

    The packs of a share have about equal tokens unless one would exceed `capacity`; then they are
    those of `_first_fit` and some empty ones.

    Returns:
        The rows of each pack, by share.
    """
    fitted = [_first_fit(units, capacity) for units in shares]
    count = -(-max(map(len, fitted)) // multiple) * multiple
    packed: list[list[Unit]] = []
    for units, tight in zip(shares, fitted, strict=True):
        packs = list(map(_joined, _balance(units, count)))
        if max(map(_tokens, packs)) > capacity:
            packs = list(map(_joined, tight))
            packs += [()] * (count - len(tight))
        packed.append(packs)
    return packed


def _joined(units: Sequence[Unit]) -> Unit:
    return tuple(itertools.chain.from_iterable(units))


def _schedule(shares: Sequence[Sequence[Unit]], layout: Layout, budget: int) -> Schedule:
    """Packs the units of every DP rank under one padded length."""
    units = list(itertools.chain.from_iterable(shares))
    rows = _joined(units)
    assert rows, "more mini-batches than samples"
    assert len({(row.chunk, row.row) for row in rows}) == len(rows), "a sample is listed twice"
    assert all(row.prompt_tokens for row in rows), "a first response token has nothing that predicts it"
    conversations: list[float] = []  # a branch is a part of one
    for row in rows:
        if row.response_tokens:
            conversations.append(row.response_tokens / (row.sequence_tokens or row.response_tokens))
    packs_multiple = layout.pp if layout.vpp > 1 else 1
    tokens_multiple = layout.tp if layout.sequence_parallel else 1
    capacity = max(budget, *map(_tokens, units))
    packed: list[list[Unit]] = [[] for _ in shares]
    teachers: list[str] = []
    for teacher in sorted({row.teacher for row in rows}):
        taught = [[unit for unit in share if unit[0].teacher == teacher] for share in shares]
        more = _pack(taught, capacity, packs_multiple)
        for packs, others in zip(packed, more, strict=True):
            packs += others
        teachers += [teacher] * len(more[0])
    longest = max(map(_tokens, itertools.chain.from_iterable(packed)))
    template = RankSchedule(
        packs=(),
        teachers=tuple(teachers),
        pack_tokens=-(-longest // tokens_multiple) * tokens_multiple,
        total_rows=len(rows),
        total_sequences=round(sum(conversations)),
        total_response_tokens=sum(row.response_tokens for row in rows),
        rows_per_unit=len(units[0]),
    )
    return Schedule(ranks=tuple(replace(template, packs=tuple(packs)) for packs in packed))
