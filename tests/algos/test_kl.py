"""KL estimators: against the exact KL and numbers by hand."""

from __future__ import annotations

from collections.abc import Callable
from math import exp

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from megarl.algos import kl
from tests.algos.inputs import numbers, seeds
from tests.oracle import kl as naive

ESTIMATORS = [kl.k1, kl.k2, kl.k3, kl.absolute, kl.k1_plus, kl.k3_plus]


@given(seeds)
def test_estimators_and_their_gradients_equal_the_oracles(seed: int) -> None:
    new, ref = numbers(2, 5, seed=seed) / 2, numbers(2, 5, seed=seed + 1) / 2  # no limit is near
    new.requires_grad_()
    for estimate in ESTIMATORS:
        found = estimate(new, ref)
        expected = getattr(naive, estimate.__name__)(new, ref)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found.sum(), new), torch.autograd.grad(expected.sum(), new))
    torch.testing.assert_close(kl.full(new, ref), naive.full(new, ref, 1.0))


@pytest.mark.parametrize("mix", [0.2, 0.5])
def test_divergences_equal_those_of_categorical_distributions(mix: float) -> None:
    random = torch.Generator().manual_seed(2)
    logits, ref_logits = (torch.randn(5, 9, generator=random, dtype=torch.float64) for _ in range(2))
    p, q = (Categorical(logits=rows) for rows in (logits, ref_logits))
    between = Categorical(probs=mix * q.probs + (1 - mix) * p.probs)
    of_q, of_p = kl_divergence(q, between), kl_divergence(p, between)
    torch.testing.assert_close(kl.full(logits, ref_logits), kl_divergence(p, q))
    torch.testing.assert_close(kl.full(logits, ref_logits, form="forward"), kl_divergence(q, p))
    torch.testing.assert_close(kl.full(logits, ref_logits, form="jsd", mix=mix), mix * of_q + (1 - mix) * of_p)


def test_estimators_are_0_at_equality_and_average_to_the_kl() -> None:
    p, q = torch.softmax(numbers(7, seed=0), 0), torch.softmax(numbers(7, seed=1), 0)
    exact = (p * (p / q).log()).sum()
    for estimate in (kl.k1, kl.k3, kl.k1_plus, kl.k3_plus):
        torch.testing.assert_close((p * estimate(p.log(), q.log())).sum(), exact)
    for estimate in ESTIMATORS:
        assert not estimate(p.log(), p.log()).any()
    for estimate in (kl.k2, kl.k3, kl.absolute):
        assert (estimate(p.log(), q.log()) > 0).all()
    torch.testing.assert_close(kl.full(p.log() + 3, q.log() - 5), exact)


@pytest.mark.parametrize("estimate", [kl.k2, kl.k1_plus, kl.k3_plus])
def test_the_gradient_of_k2_and_the_plus_variants_is_that_of_the_kl(estimate: Callable[..., Tensor]) -> None:
    logits, q = numbers(7, seed=0).requires_grad_(), torch.softmax(numbers(7, seed=1), 0)
    logp = torch.log_softmax(logits, 0)
    (exact,) = torch.autograd.grad(kl.full(logits, q.log()), logits, retain_graph=True)
    (sampled,) = torch.autograd.grad((logp.exp().detach() * estimate(logp, q.log())).sum(), logits)
    torch.testing.assert_close(sampled, exact)


@pytest.mark.parametrize("estimate", [kl.k1_plus, kl.k3_plus])
def test_slopes_of_the_plus_variants_are_weighted(estimate: Callable[..., Tensor]) -> None:
    new = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    weights = torch.tensor([2.0, 0.5, 3.0], requires_grad=True)
    estimate(new, torch.tensor([-1.5, -1.0, -0.5]), weights).sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([2.0 * 0.5, 0.5 * -1.0, 0.0])
    assert weights.grad is None


def test_clamping_stops_the_gradient() -> None:
    new = torch.tensor([-30.0, -4.0, -1.0], requires_grad=True)
    (grad,) = torch.autograd.grad(kl.k3(new, torch.zeros(3)).sum(), new)
    assert grad.tolist() == pytest.approx([0.0, 0.0, 1 - exp(1.0)])
    (grad,) = torch.autograd.grad(kl.k1(new, torch.zeros(3), limit=10.0).sum(), new)
    assert grad.tolist() == [0.0, 1.0, 1.0]


def test_weights_are_multiplied_before_clamping() -> None:
    new, ref = torch.tensor([-1.0, -1.0]), torch.tensor([-7.0, -7.0])
    assert kl.k1(new, ref, torch.tensor([2.0, 0.5]), limit=10.0).tolist() == [10.0, 3.0]
