"""What comes of comparing: the samples of a prompt, the responses of a pair, the scores of reference samples."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megarl.algos.metrics import group_metrics
from megarl.algos.preference import pairwise


def test_group_metrics_by_hand() -> None:
    scores = torch.tensor([1.0, 0.5, 5.0, 0.5, 7.0])
    metrics = group_metrics(scores, torch.tensor([0, 1, 0, 1, 2]))
    assert metrics == pytest.approx({"group/std_mean": 2 / 3, "group/zero_std_fraction": 2 / 3})


# ---- pairs


def test_a_pair_by_hand() -> None:
    loss = pairwise(torch.tensor([1.0, 0.5]), torch.tensor([0.0, 0.5]), centering=0.1)
    expected = [math.log(1 + math.exp(-1)) + 0.1, math.log(2) + 0.1]
    assert loss.values.tolist() == pytest.approx(expected)
    assert {name: values.tolist() for name, values in loss.metrics.items()} == {
        "accuracy": [1.0, 0.0],
        "margin": [1.0, 0.0],
        "chosen": [1.0, 0.5],
        "rejected": [0.0, 0.5],
    }


def test_the_gradient_of_a_pair_agrees_with_finite_differences_and_is_finite_far_out() -> None:
    chosen, rejected = (
        torch.tensor([0.3, -2.0, 100.0, -100.0]).double(),
        torch.tensor([1.0, -2.0, -100.0, 100.0]).double(),
    )

    def loss(c: Tensor, r: Tensor) -> Tensor:
        return pairwise(c, r, centering=0.1).values

    assert torch.autograd.gradcheck(loss, (chosen.requires_grad_(), rejected.requires_grad_()))
    far = pairwise(torch.tensor([-1e4]), torch.tensor([1e4]))
    assert far.values.item() == pytest.approx(2e4)
    assert not any(metric.requires_grad for metric in pairwise(chosen, rejected).metrics.values())
