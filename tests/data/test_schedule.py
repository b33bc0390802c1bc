"""Properties of the schedules: coverage, disjointness, order, bounds, and independence of the layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.schedule import (
    inference_schedule,
    mini_batch_members,
    step_schedule,
    under_one_length,
    update_schedules,
)
from megarl.types import Layout, SampleInfo, Schedule


def make_samples(lengths: Sequence[tuple[int, ...]], chunk_rows: int) -> list[SampleInfo]:
    """Samples of so many prompt, response and given tokens."""
    return [
        SampleInfo(
            sample_id=f"s{i}",
            prompt_id=f"p{i // 2}",
            chunk=i // chunk_rows,
            row=i % chunk_rows,
            prompt_tokens=prompt,
            response_tokens=response,
            finished=True,
            given_tokens=sum(more),
        )
        for i, (prompt, response, *more) in enumerate(lengths)
    ]


samples = st.builds(
    make_samples,
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 30), st.sampled_from([0, 0, 9])), min_size=1, max_size=40),
    st.integers(1, 7),
)
layouts = st.builds(
    Layout,
    tp=st.integers(1, 4),
    pp=st.integers(1, 3),
    dp=st.integers(1, 5),
    vpp=st.integers(1, 2),
    sequence_parallel=st.booleans(),
)
budgets = st.integers(1, 120)


def rows_of(schedule: Schedule) -> list[list[tuple[int, int]]]:
    """(chunk, row) by DP rank."""
    return [[(r.chunk, r.row) for pack in rank.packs for r in pack] for rank in schedule.ranks]


def check_pass(schedule: Schedule, members: list[SampleInfo], layout: Layout, budget: int) -> None:
    """What holds for every pass."""
    longest = max(s.tokens for s in members)
    by_place = {(s.chunk, s.row): s for s in members}
    flat = [place for rank in rows_of(schedule) for place in rank]
    assert Counter(flat) == Counter(by_place.keys()), "every sample exactly once"
    assert len(schedule.ranks) == layout.dp
    assert {rank.total_rows for rank in schedule.ranks} == {len(members)}
    assert {rank.total_response_tokens for rank in schedule.ranks} == {sum(s.response_tokens for s in members)}
    assert len({len(rank.packs) for rank in schedule.ranks}) == 1, "equal numbers of packs"
    assert layout.vpp == 1 or len(schedule.ranks[0].packs) % layout.pp == 0
    (pack_tokens,) = {rank.pack_tokens for rank in schedule.ranks}
    unit = layout.tp if layout.sequence_parallel else 1
    longest_pack = max(sum(r.tokens for r in pack) for rank in schedule.ranks for pack in rank.packs)
    assert pack_tokens in range(longest_pack, longest_pack + unit), "no longer than its own longest pack needs"
    assert pack_tokens % unit == 0
    for rank in schedule.ranks:
        for pack in rank.packs:
            assert sum(r.tokens for r in pack) <= min(pack_tokens, max(budget, longest))
            for r in pack:
                sample = by_place[r.chunk, r.row]
                assert (r.prompt_tokens, r.response_tokens) == (sample.prompt_tokens, sample.response_tokens)
                assert r.tokens == sample.tokens


@given(samples, layouts, budgets)
def test_inference_covers_every_sample_once_in_whole_chunks(
    samples: list[SampleInfo], layout: Layout, budget: int
) -> None:
    schedule = inference_schedule(samples, layout, budget)
    check_pass(schedule, samples, layout, budget)
    chunks = [{chunk for chunk, _ in rank} for rank in rows_of(schedule)]
    assert sum(map(len, chunks)) == len({s.chunk for s in samples}), "no chunk on two ranks"


units = st.integers(1, 3).flatmap(
    lambda rows_per_unit: st.tuples(
        st.just(rows_per_unit),
        st.lists(
            st.lists(st.tuples(st.integers(1, 20), st.integers(0, 30)), min_size=rows_per_unit, max_size=rows_per_unit),
            min_size=1,
            max_size=20,
        ).map(lambda units: [lengths for unit in units for lengths in unit]),
    )
)


@given(units, st.integers(1, 4), layouts, budgets, st.randoms())
def test_a_step_keeps_groups_together_and_balances_tokens(
    units: tuple[int, list[tuple[int, int]]], chunk_units: int, layout: Layout, budget: int, random: object
) -> None:
    rows_per_unit, lengths = units
    samples = make_samples(lengths, rows_per_unit * chunk_units)
    schedule = step_schedule(samples, layout, budget, rows_per_unit=rows_per_unit)
    tokens = [
        sum(s.tokens for s in samples[start : start + rows_per_unit]) for start in range(0, len(samples), rows_per_unit)
    ]
    check_pass(schedule, samples, layout, max(budget, *tokens, 0))
    for pack in (pack for rank in schedule.ranks for pack in rank.packs):
        for start in range(0, len(pack), rows_per_unit):
            unit = pack[start : start + rows_per_unit]
            first = unit[0].row
            assert first % rows_per_unit == 0
            assert [(r.chunk, r.row) for r in unit] == [(unit[0].chunk, first + i) for i in range(rows_per_unit)]
    loads = [sum(r.tokens for pack in rank.packs for r in pack) for rank in schedule.ranks]
    assert max(loads) - min(loads) <= max(tokens), "moving a unit could not balance ranks better"
    random.shuffle(samples)  # type: ignore[attr-defined]
    assert schedule == step_schedule(samples, layout, budget, rows_per_unit=rows_per_unit)


@pytest.mark.parametrize(("rows", "name"), [([0, 1, 2], "s2"), ([0, 3], "s0")])
def test_a_step_with_half_a_pair_is_refused(rows: list[int], name: str) -> None:
    samples = make_samples([(1, 1)] * 4, 4)
    with pytest.raises(AssertionError, match=f"a neighbor of {name} is missing"):
        step_schedule([samples[row] for row in rows], Layout(), 8, rows_per_unit=2)


@given(samples, layouts, budgets, st.integers(1, 4), st.integers(1, 3), st.integers(0, 99), st.integers(0, 99))
def test_update_covers_every_sample_once_per_epoch(
    samples: list[SampleInfo], layout: Layout, budget: int, mini_batches: int, epochs: int, seed: int, step: int
) -> None:
    mini_batches = min(mini_batches, len(samples))
    schedules = update_schedules(
        samples, layout, budget, mini_batches=mini_batches, epochs=epochs, seed=seed, step=step
    )
    assert len(schedules) == epochs * mini_batches
    for epoch in range(epochs):
        members = mini_batch_members(samples, mini_batches, seed=seed, step=step, epoch=epoch)
        assert Counter(s.sample_id for m in members for s in m) == Counter(s.sample_id for s in samples)
        sizes = [len(m) for m in members]
        assert max(sizes) - min(sizes) <= 1
        for schedule, expected in zip(schedules[epoch * mini_batches :], members, strict=False):
            check_pass(schedule, expected, layout, budget)
            counts = [len(rank) for rank in rows_of(schedule)]
            assert max(counts) - min(counts) <= 1, "rows are balanced"


@given(samples, layouts, layouts, budgets, budgets, st.randoms())
def test_mini_batches_do_not_depend_on_layout_token_budget_chunks_or_order(
    samples: list[SampleInfo], one: Layout, other: Layout, budget: int, other_budget: int, random: object
) -> None:
    rechunked = make_samples([(s.prompt_tokens, s.response_tokens) for s in samples], 3)
    random.shuffle(rechunked)  # type: ignore[attr-defined]
    options = {"mini_batches": min(3, len(samples)), "epochs": 2, "seed": 5, "step": 7}

    def members(samples: list[SampleInfo], layout: Layout, budget: int) -> list[set[str]]:
        names = {(s.chunk, s.row): s.sample_id for s in samples}
        schedules = update_schedules(samples, layout, budget, **options)
        return [{names[place] for rank in rows_of(schedule) for place in rank} for schedule in schedules]

    assert members(samples, one, budget) == members(rechunked, other, other_budget)


def test_membership_follows_seed_step_and_epoch() -> None:
    samples = make_samples([(1, 1)] * 16, 4)
    options = {"seed": 0, "step": 0, "epoch": 0}
    base = mini_batch_members(samples, 2, **options)
    assert base == mini_batch_members(samples[::-1], 2, **options)
    for changed in ("seed", "step", "epoch"):
        assert base != mini_batch_members(samples, 2, **{**options, changed: 1})


def test_membership_of_a_known_case_is_stable_across_processes() -> None:
    members = mini_batch_members(make_samples([(1, 1)] * 6, 4), 2, seed=1, step=2, epoch=3)
    assert [[s.sample_id for s in m] for m in members] == [["s2", "s5", "s1"], ["s0", "s4", "s3"]]


@given(samples, st.integers(1, 5))
def test_token_counts_per_rank_differ_by_less_than_the_longest_sample(samples: list[SampleInfo], dp: int) -> None:
    (schedule,) = update_schedules(samples, Layout(dp=dp), 64, mini_batches=1, epochs=1, seed=0, step=0)
    loads = [sum(r.tokens for pack in rank.packs for r in pack) for rank in schedule.ranks]
    assert max(loads) - min(loads) <= max(s.tokens for s in samples)


def test_the_longest_sample_of_a_round_goes_to_the_rank_with_the_fewest_tokens() -> None:
    samples = make_samples([(1, 7), (1, 3), (1, 3), (1, 1)], 4)
    (schedule,) = update_schedules(samples, Layout(dp=2), 64, mini_batches=1, epochs=1, seed=0, step=0)
    assert [sorted(r.tokens for pack in rank.packs for r in pack) for rank in schedule.ranks] == [[2, 8], [4, 4]]


def test_balancing_packs_reduces_padding() -> None:
    # 1,100 tokens under a budget of 1,000: first fit would make packs of 1,000 and 100, both padded to 1,000.
    schedule = inference_schedule(make_samples([(50, 50)] * 11, 11), Layout(), 1000)
    assert [sum(r.tokens for r in pack) for pack in schedule.ranks[0].packs] == [600, 500]
    assert schedule.ranks[0].pack_tokens == 600


def test_first_fit_is_used_if_balancing_would_exceed_the_budget() -> None:
    # Longest to emptiest gives 3+2+2 and 3+2; first fit gives 3+3 and 2+2+2, which a budget of 6 needs.
    schedule = inference_schedule(make_samples([(1, 2), (1, 2), (1, 1), (1, 1), (1, 1)], 5), Layout(), 6)
    assert sorted(sorted(r.tokens for r in pack) for pack in schedule.ranks[0].packs) == [[2, 2, 2], [3, 3]]


@given(samples, st.integers(1, 3), st.integers(1, 3))
def test_each_pack_has_the_samples_of_one_teacher(samples: list[SampleInfo], dp: int, stages: int) -> None:
    taught = [replace(sample, teacher="ab"[sample.prompt_tokens % 2]) for sample in samples]
    layout = Layout(dp=dp, pp=stages, vpp=min(2, stages))
    schedule = inference_schedule(taught, layout, 64)
    assert len({rank.teachers for rank in schedule.ranks}) == 1
    found: list[tuple[int, int]] = []
    for rank in schedule.ranks:
        for teacher, pack in zip(rank.teachers, rank.packs, strict=True):
            assert {row.teacher for row in pack} <= {teacher}
            found += [(row.chunk, row.row) for row in pack]
    assert sorted(found) == sorted((sample.chunk, sample.row) for sample in samples)


def test_all_passes_of_a_step_have_packs_of_one_length() -> None:
    layout = Layout(dp=2, pp=2, vpp=2)
    one, other = (
        step_schedule(make_samples([(5, 5)] * 3, 3), layout, 8),
        step_schedule(make_samples([(1, 2)], 1), layout, 8),
    )
    long, short = under_one_length(one, other)
    assert long == one
    for rank, before in zip(short.ranks, other.ranks, strict=True):
        assert (before.pack_tokens, rank.pack_tokens) == (3, 10)
        assert replace(rank, pack_tokens=3) == before, "rows and denominators are its own"


def test_sequences_without_a_response_do_not_count() -> None:
    (rank,) = step_schedule(make_samples([(5, 0), (1, 2), (3, 0)], 3), Layout(), 8).ranks
    assert (rank.total_rows, rank.total_sequences, rank.total_response_tokens) == (3, 1, 2)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (make_samples([(1, 1)], 1), "more mini-batches than samples"),
        (make_samples([(0, 1), (1, 1)], 2), "nothing that predicts it"),
        (make_samples([(1, 1)] * 2, 2) * 2, "listed twice"),
    ],
)
def test_what_no_run_has_is_refused(samples: list[SampleInfo], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        update_schedules(samples, Layout(), 8, mini_batches=2, epochs=1, seed=0, step=0)
