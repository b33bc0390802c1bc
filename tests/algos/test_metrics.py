"""Metrics by hand."""

from __future__ import annotations

import pytest
import torch

from megarl.algos.metrics import rollout_gap


def test_rollout_gap_is_the_mean_over_tokens_of_all_ranks() -> None:
    old = torch.tensor([[-1.0, -2.0, -9.0], [-3.0, 5.0, 5.0]])
    rollout = torch.tensor([[-1.5, -2.0, -1.0], [-2.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert rollout_gap(old, rollout, mask, reduce=lambda v: v) == pytest.approx((0.5 + 0.0 + 1.0) / 3)
    another_rank = torch.tensor([1.0, 2.5], dtype=torch.float64)
    assert rollout_gap(old, rollout, mask, reduce=lambda v: v + another_rank) == pytest.approx((1.5 + 2.5) / 4)
    nothing = torch.zeros(0, 0)
    assert rollout_gap(nothing, nothing, nothing.bool(), reduce=lambda v: v) == 0.0
