"""Curricula against counts and naive probabilities."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.algos.curriculum import DRAWS_KEPT, History, learnability, pools, thompson

Draws = list[tuple[float, int]]
DRAWS = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 8)), max_size=DRAWS_KEPT)
"""What was solved of a draw, and its samples."""
NOW = 10


def history(draws: list[Draws]) -> History:
    """Each prompt's draws, in steps 1, 2 and so on."""
    shape = (len(draws), DRAWS_KEPT)
    steps, samples, solved = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape)
    for row, of_prompt in enumerate(draws):
        for step, (rate, number) in enumerate(of_prompt, 1):
            column = DRAWS_KEPT - len(of_prompt) + step - 1
            steps[row, column], samples[row, column], solved[row, column] = step, number, rate
    return History(step=NOW, steps=steps, samples=samples, scores=solved, solved=solved)


def counts(draws: Draws, half_life: float) -> tuple[float, float]:
    """Solved and unsolved samples, of which half count after some steps, with one of each before the first."""
    solved = unsolved = 1.0
    for step, (rate, samples) in enumerate(draws, 1):
        weight = 0.5 ** ((NOW - step) / half_life)
        solved += weight * rate * samples
        unsolved += weight * (1 - rate) * samples
    return solved, unsolved


@given(st.lists(DRAWS, min_size=1, max_size=12), st.data())
def test_pools_have_their_shares_and_prompts_that_waited_longest(draws: list[Draws], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(draws)))
    hard_share, easy_share = data.draw(st.sampled_from([(0.1, 0.1), (0.5, 0.5), (0.0, 0.3)]))
    random = np.random.default_rng(data.draw(st.integers(0, 5)))
    shares = {"hard_share": hard_share, "easy_share": easy_share}
    chosen = pools(history(draws), count, random, half_life=5.0, **shares).tolist()
    assert len(set(chosen)) == len(chosen) == count

    def pool(index: int) -> str:
        solved, unsolved = counts(draws[index], 5.0)
        rate = solved / (solved + unsolved)
        return "hard" if rate < 0.2 else "easy" if rate > 0.8 else "medium"

    there = Counter(map(pool, range(len(draws))))
    taken = Counter(map(pool, chosen))
    least = {"hard": int(hard_share * count), "easy": int(easy_share * count)}
    least["medium"] = count - sum(least.values()) - 2  # each of the others may be rounded up
    for name, size in least.items():
        assert taken[name] >= min(size, there[name])
    for name in there:
        waited = [len(draws[index]) for index in chosen if pool(index) == name]
        left = [len(draws[index]) for index in range(len(draws)) if pool(index) == name and index not in chosen]
        assert not waited or not left or max(waited) <= min(left)


def test_small_shares_are_taken_by_chance() -> None:
    kinds: list[Draws] = [[(0.0, 64)]] * 4 + [[(0.5, 64)]] * 8
    random = np.random.default_rng(3)
    hard = [sum(index < 4 for index in pools(history(kinds), 4, random).tolist()) for _ in range(2000)]
    assert set(hard) == {0, 1}
    assert np.mean(hard) == pytest.approx(0.4, abs=0.04)


PROMPTS: list[Draws] = [[], [(1.0, 8)], [(0.5, 4), (0.25, 4)], [(0.0, 64)]]


def test_learnability_draws_in_proportion_to_what_is_learned() -> None:
    """p * (1 - p) in expectation, by many samples of the distribution."""
    random = np.random.default_rng(1)
    expected = []
    for draws in PROMPTS:
        samples = random.beta(*counts(draws, 50.0), size=400_000)
        expected.append((samples * (1 - samples)).mean())
    first = Counter(learnability(history(PROMPTS), 1, random).item() for _ in range(20_000))
    shares = [first[index] / 20_000 for index in range(len(PROMPTS))]
    assert shares == pytest.approx(np.array(expected) / sum(expected), abs=0.015)
    assert sorted(learnability(history(PROMPTS), 4, random).tolist()) == [0, 1, 2, 3]


def test_thompson_takes_rates_near_the_target_and_tries_what_is_unknown() -> None:
    random = np.random.default_rng(2)
    certain: list[Draws] = [[(0.2, 10_000)], [(0.45, 10_000)], [(0.9, 10_000)]]
    assert thompson(history(certain), 2, random).tolist() == [1, 0]
    assert thompson(history(certain), 2, random, target=0.8).tolist() == [2, 1]
    first = Counter(thompson(history([[], *certain]), 1, random).item() for _ in range(4_000))
    assert set(first) == {0, 2}
    assert first[0] / 4_000 == pytest.approx(0.1, abs=0.02), "its rate is uniform, and nearest within 0.05"


def test_what_is_long_ago_is_forgotten() -> None:
    prompts: list[Draws] = [[(0.5, 1000)], [(0.0, 16)]]
    random = np.random.default_rng(4)
    again = [thompson(history(prompts), 1, random, half_life=half_life).item() for half_life in [1.0] * 99 + [50.0]]
    assert again[-1] == 0
    assert 1 in again
