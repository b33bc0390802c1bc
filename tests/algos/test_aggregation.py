"""Aggregations: one denominator per optimizer step; how it may be split is in test_losses and in the vectors."""

from __future__ import annotations

import pytest
import torch

from megarl.algos.aggregation import weighted_sum
from tests.algos.examples import AGGREGATIONS, MASK, step_weights
from tests.oracle import aggregation as naive


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_token_weights_equal_the_oracles(name: str) -> None:
    lengths = [n for n in MASK.sum(-1).tolist() if n]
    options = {"tokens": 7} if name == "sequence_sum_norm" else {}
    weights = step_weights(MASK, AGGREGATIONS[name])
    assert not weights[~MASK].any()
    for row, mask in zip(weights, MASK, strict=True):
        for weight in row[mask].tolist():
            assert weight == pytest.approx(getattr(naive, name)(int(mask.sum()), lengths, **options))


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
