"""Metrics of a step over micro-batches and two ranks, by hand, and the precision of the head of critics."""

from __future__ import annotations

import math

import pytest
import torch

from megarl.algos.policy_loss import LossTerms
from megarl.megatron.loss_metrics import LossMetrics, collect, reduce_metrics
from megarl.megatron.model import ScalarHead
from tests.pool import RankPool

RATIOS = {0: [[[1.0, 3.0]], [[2.0, 99.0]]], 1: [[[6.0, -99.0]], []]}
"""By rank and micro-batch, [B, R]; of the second of rank 0 and the first of rank 1, the second token does not count."""
MASKS = {0: [[[True, True]], [[True, False]]], 1: [[[True, False]], []]}


def _reported(rank: int) -> dict[str, float]:
    import torch.distributed as dist

    parts = []
    for values, counted in zip(RATIOS[rank], MASKS[rank], strict=True):
        mask = torch.tensor(counted, dtype=torch.bool).view(-1, 2)
        ratio = torch.tensor(values).view(-1, 2)
        terms = LossTerms(values=ratio, metrics={"double": 2 * ratio}, spreads={"ratio": ratio})
        parts.append(collect(terms, mask, mask.float() / 4))
    pair = torch.tensor(3.0 + rank), torch.tensor(2 - rank)
    never = torch.tensor(0.0), torch.tensor(0)
    parts.append(LossMetrics(sums={"text": torch.tensor(0.5)}, means={"pair": pair, "never": never}))
    assert dist.group.WORLD is not None
    return reduce_metrics(parts, dist.group.WORLD)


@pytest.mark.dist
def test_metrics_cover_the_counted_tokens_of_all_ranks(pool: RankPool) -> None:
    one, other = pool.run(_reported, world_size=2)
    assert one == other
    # 1, 3, 2 and 6: mean 3, mean square 12.5.
    assert one == {
        "double": 6.0,
        "ratio_mean": 3.0,
        "ratio_var": 3.5,
        "ratio_max": 6.0,
        "ratio_min": 1.0,
        "text": 1.0,
        "pair": 7 / 3,
    }


def _without_tokens(rank: int) -> dict[str, float]:
    import torch.distributed as dist

    terms = LossTerms(values=torch.zeros(1, 2), metrics={}, spreads={"ratio": torch.full((1, 2), math.nan)})
    assert dist.group.WORLD is not None
    return reduce_metrics([collect(terms, torch.zeros(1, 2, dtype=torch.bool), torch.zeros(1, 2))], dist.group.WORLD)


@pytest.mark.dist
def test_a_step_without_tokens_reports_no_metrics(pool: RankPool) -> None:
    assert pool.run(_without_tokens, world_size=1) == [{}]


def test_a_small_variance_is_numerically_stable() -> None:
    """In float32 the mean of the squares of numbers near 1 has no digit left of a variance of 1e-10."""
    ratio = 1 + torch.tensor([[-1e-5, 1e-5]])
    terms = LossTerms(values=ratio, metrics={}, spreads={"ratio": ratio})
    metrics = collect(terms, torch.ones(1, 2).bool(), torch.full((1, 2), 0.5))
    mean, weight = metrics.means["ratio_mean"]
    assert weight == 1
    variance = metrics.squares["ratio"] - mean**2
    assert float(variance) == pytest.approx(ratio.double().var(correction=0).item(), rel=1e-4)


def test_a_16_bit_models_score_is_computed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two responses whose scores differ by less than bfloat16 has digits for are still told apart."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    head = ScalarHead(64, torch.bfloat16)
    hidden = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    hidden[1, 1:] = hidden[0, 1:]
    hidden[:, 0] = torch.tensor([0.0, 0.01])
    head.weight.data.copy_(torch.ones(1, 64))
    scores = head(hidden)
    expected = hidden.double().sum(-1)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-5)
    assert scores[1] > scores[0]
    scores.sum().backward()
    assert head.weight.grad is not None
    torch.testing.assert_close(head.weight.grad[0].double(), hidden.double().sum(0), rtol=1e-2, atol=1e-2)
