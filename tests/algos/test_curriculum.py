"""Curricula against counts and naive probabilities."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.algos.curriculum import KEPT, History, learnability, pools, thompson

DRAWS = st.lists(st.tuples(st.floats(-1, 3), st.integers(1, 8)), max_size=KEPT)


def history(draws: list[list[tuple[float, int]]]) -> History:
    """Each prompt's draws, a mean score and a number of samples each, in steps 1, 2 and so on."""
    shape = (len(draws), KEPT)
    found = History(scores=np.full(shape, np.nan), samples=np.zeros(shape, np.int64), steps=np.zeros(shape, np.int64))
    for row, of_prompt in enumerate(draws):
        for step, (score, samples) in enumerate(of_prompt, 1):
            column = KEPT - len(of_prompt) + step - 1
            found.scores[row, column], found.samples[row, column], found.steps[row, column] = score, samples, step
    return found


def rate(draws: list[tuple[float, int]], recent: int, lowest: float, highest: float) -> tuple[float, float]:
    """Right and wrong answers, with one of each before the first."""
    right = wrong = 1.0
    for score, samples in draws[-recent:]:
        solved = min(max((score - lowest) / (highest - lowest), 0.0), 1.0)
        right += solved * samples
        wrong += (1 - solved) * samples
    return right, wrong


@given(st.lists(DRAWS, min_size=1, max_size=12), st.data())
def test_pools_have_their_shares_and_prompts_that_waited_longest(
    draws: list[list[tuple[float, int]]], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(draws)))
    hard_share, easy_share = data.draw(st.sampled_from([(0.1, 0.1), (0.5, 0.5), (0.0, 0.3)]))
    chosen = pools(
        history(draws),
        count,
        np.random.default_rng(0),
        hard_share=hard_share,
        easy_share=easy_share,
        highest=2.0,
        recent=3,
    ).tolist()
    assert len(set(chosen)) == len(chosen) == count

    def pool(index: int) -> str:
        right, wrong = rate(draws[index], 3, 0.0, 2.0)
        solved = right / (right + wrong)
        return "hard" if solved < 0.2 else "easy" if solved > 0.8 else "medium"

    there = Counter(map(pool, range(len(draws))))
    taken = Counter(map(pool, chosen))
    wanted = {
        "hard": round(hard_share * count),
        "easy": min(round(easy_share * count), count - round(hard_share * count)),
    }
    wanted["medium"] = count - sum(wanted.values())
    for name, size in wanted.items():
        assert taken[name] >= min(size, there[name])
        if there[name] <= size:
            assert taken[name] == there[name]
    for name in there:
        waited = [len(draws[index]) for index in chosen if pool(index) == name]
        left = [len(draws[index]) for index in range(len(draws)) if pool(index) == name and index not in chosen]
        assert not waited or not left or max(waited) <= min(left)


PROMPTS = [[], [(1.0, 8)], [(0.5, 4), (0.25, 4)], [(0.0, 64)]]


def test_learnability_draws_in_proportion_to_what_is_learned() -> None:
    """p * (1 - p) in expectation, by many samples of the posterior."""
    random = np.random.default_rng(1)
    expected = []
    for draws in PROMPTS:
        samples = random.beta(*rate(draws, 4, 0.0, 1.0), size=400_000)
        expected.append((samples * (1 - samples)).mean())
    first = Counter(learnability(history(PROMPTS), 1, random).item() for _ in range(20_000))
    shares = [first[index] / 20_000 for index in range(len(PROMPTS))]
    assert shares == pytest.approx(np.array(expected) / sum(expected), abs=0.015)
    assert sorted(learnability(history(PROMPTS), 4, random).tolist()) == [0, 1, 2, 3]


def test_thompson_takes_rates_near_the_target_and_tries_what_is_unknown() -> None:
    random = np.random.default_rng(2)
    certain = [[(0.2, 10_000)], [(0.45, 10_000)], [(0.9, 10_000)]]
    assert thompson(history(certain), 2, random).tolist() == [1, 0]
    assert thompson(history(certain), 2, random, target=0.8).tolist() == [2, 1]
    first = Counter(thompson(history([[], *certain]), 1, random).item() for _ in range(4_000))
    assert set(first) == {0, 2}
    assert first[0] / 4_000 == pytest.approx(0.1, abs=0.02), "its rate is uniform, and nearest within 0.05"
