"""Aggregations: one denominator per optimizer step, however it is split."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algos.aggregation import sequence_mean, sequence_sum, token_mean, token_sum, weighted_sum
from tests.algos.examples import AGGREGATIONS, MASK, step_weights
from tests.algos.inputs import numbers
from tests.oracle import aggregation as naive

LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_token_weights_equal_the_oracles(name: str) -> None:
    lengths = [n for n in MASK.sum(-1).tolist() if n]
    options = {"tokens": 7} if name == "sequence_sum_norm" else {}
    weights = step_weights(MASK, AGGREGATIONS[name])
    assert not weights[~MASK].any()
    for row, mask in zip(weights, MASK, strict=True):
        for weight in row[mask].tolist():
            assert weight == pytest.approx(getattr(naive, name)(int(mask.sum()), lengths, **options))


@given(LENGTHS, st.integers(0, 99), st.integers(1, 4))
def test_weighted_sums_do_not_depend_on_the_split(lengths: list[int], seed: int, parts: int) -> None:
    values = numbers(len(lengths), 6, seed=seed)
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    rows = [row[:n].tolist() for row, n in zip(values, lengths, strict=True) if n]
    expected = {
        token_mean: sum(map(sum, rows)) / sum(lengths),
        token_sum: sum(map(sum, rows)),
        sequence_mean: sum(sum(row) / len(row) for row in rows) / len(rows),
        sequence_sum: sum(map(sum, rows)) / len(rows),
    }
    totals = {"total_tokens": sum(lengths), "total_sequences": len(rows)}
    order = random.Random(seed).sample(range(len(lengths)), len(lengths))
    for aggregate, mean in expected.items():
        split = sum(
            weighted_sum(values[order[i::parts]], step_weights(mask[order[i::parts]], aggregate, **totals))
            for i in range(parts)
        )
        assert float(split) == pytest.approx(mean, abs=1e-12)


def test_masked_tokens_may_have_any_value() -> None:
    values = torch.tensor([[1.0, float("nan")], [float("inf"), 3.0]], requires_grad=True)
    total = weighted_sum(values, torch.tensor([[0.5, 0.0], [0.0, 0.5]]))
    assert total.item() == 2.0
    total.backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[0.5, 0.0], [0.0, 0.5]]


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_a_micro_batch_without_tokens_contributes_nothing(name: str) -> None:
    for shape in ((0, 0), (2, 3)):
        weights = AGGREGATIONS[name](torch.zeros(shape).bool(), total_tokens=9, total_sequences=3)
        assert weights.dtype == torch.float32
        assert weighted_sum(torch.ones(shape), weights).item() == 0.0


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_a_step_without_tokens_is_finite(name: str) -> None:
    weights = AGGREGATIONS[name](torch.zeros(2, 3).bool(), total_tokens=0, total_sequences=0)
    assert weighted_sum(torch.ones(2, 3), weights).item() == 0.0
