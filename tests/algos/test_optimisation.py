"""Mini-batches, weight averages, and return normalisation; Adam's epsilon is in the vectors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algos.normalization import Reduce
from megarl.algos.optimization import divided, ema, exceeds_target
from megarl.algos.value_loss import ValueMoments
from tests.algos.examples import MASK
from tests.algos.inputs import local, numbers, on_ranks


@given(st.lists(st.integers(), max_size=30), st.integers(1, 9))
def test_an_epoch_is_divided_evenly_in_order(items: list[int], parts: int) -> None:
    pieces = divided(items, parts)
    assert [item for piece in pieces for item in piece] == items
    assert len(pieces) == parts
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


def test_early_stopping_is_strictly_above_the_target() -> None:
    assert not exceeds_target(0.75, target=0.5, factor=1.5)
    assert exceeds_target(0.1500001, target=0.1)
    assert not exceeds_target(-1.0, target=0.1)


@given(st.floats(0.0, 1.0))
def test_the_ema_equals_its_closed_form(decay: float) -> None:
    average = start = numbers(3, seed=0)
    actors = [numbers(3, seed=seed) for seed in range(1, 6)]
    for actor in actors:
        average = ema(average, actor, decay=decay)
    expected = decay**5 * start + sum((1 - decay) * decay ** (4 - k) * actor for k, actor in enumerate(actors))
    torch.testing.assert_close(average, expected)


def test_the_ema_of_bfloat16_weights_is_in_float32() -> None:
    average = ema(torch.zeros(2), torch.ones(2, dtype=torch.bfloat16), decay=0.992)
    assert average.dtype == torch.float32
    torch.testing.assert_close(average, torch.full((2,), 0.008))


def test_the_moments_of_one_batch_equal_those_of_its_tokens() -> None:
    returns = numbers(*MASK.shape, seed=0)
    moments = ValueMoments().update(torch.where(MASK, returns, math.nan), MASK, local)
    own = returns[MASK]
    expected = own.mean().item(), own.std(correction=0).item()
    assert moments.mean_and_std(eps=0.0) == pytest.approx(expected, rel=1e-9)


def test_moments_decay_and_are_over_all_ranks() -> None:
    batches = [numbers(*MASK.shape, seed=seed) for seed in range(3)]

    def course(part: slice, reduce: Reduce) -> ValueMoments:
        moments = ValueMoments()
        for batch in batches:
            moments = moments.update(batch[part], MASK[part], reduce, beta=0.9)
        return moments

    whole = course(slice(0, 4), local)
    assert whole.weight == pytest.approx(1 - 0.9**3)
    assert whole.mean == pytest.approx(sum(0.1 * 0.9 ** (2 - k) * b[MASK].mean().item() for k, b in enumerate(batches)))
    for own in on_ranks(course, [(slice(0, 1),), (slice(1, 4),), (slice(0, 0),)]):
        assert vars(own) == pytest.approx(vars(whole))
    assert whole.update(batches[0], torch.zeros_like(MASK), local) == whole
    for spoilt in (math.nan, math.inf):  # the return of a token
        assert whole.update(torch.where(MASK.cumsum(-1) == 1, spoilt, batches[0]), MASK, local) == whole


def test_values_are_denormalised() -> None:
    moments = ValueMoments(mean=3.0, square=13.0, weight=1.0)
    assert moments.mean_and_std() == (3.0, 2.0)
    values = torch.tensor([1.0, 3.0, 8.0])
    assert moments.normalise(values).tolist() == [-1.0, 0.0, 2.5]
    torch.testing.assert_close(moments.denormalise(moments.normalise(values)), values)
    assert moments.normalise(torch.tensor([100.0, -100.0])).tolist() == [5.0, -5.0]


def test_constant_returns_have_the_minimum_deviation() -> None:
    moments = ValueMoments()
    for _ in range(3):
        moments = moments.update(torch.full((2, 3), 7.0), torch.ones(2, 3).bool(), local, beta=0.9)
    mean, std = moments.mean_and_std()
    assert (mean, std) == (pytest.approx(7.0), 0.1)
    assert ValueMoments().mean_and_std() == (0.0, 0.1)
