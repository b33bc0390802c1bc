"""KL estimators: against the exact KL, finite differences and numbers by hand."""

from __future__ import annotations

from collections.abc import Callable
from math import exp

import pytest
import torch
from hypothesis import given
from torch import Tensor

from megarl.algos import kl
from tests.algos.inputs import numbers, seeds
from tests.oracle import kl as naive

ESTIMATORS = [kl.k1, kl.k2, kl.k3, kl.absolute, kl.k1_plus, kl.k3_plus]
Slope = Callable[[float], float]


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


@pytest.mark.parametrize(
    ("estimate", "slope"),
    [
        (kl.k1, lambda d: 1.0),
        (kl.k2, lambda d: d),
        (kl.k3, lambda d: 1 - exp(-d)),
        (kl.absolute, lambda d: 1.0 if d > 0 else -1.0 if d < 0 else 0.0),
        (kl.k1_plus, lambda d: d),
        (kl.k3_plus, lambda d: d),
    ],
)
def test_slopes_with_and_without_weights(estimate: Callable[..., Tensor], slope: Slope) -> None:
    distances, weights = (0.5, -1.0, 0.0), (2.0, 0.5, 3.0)
    for given_weights in (None, torch.tensor(weights, requires_grad=True)):
        new = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
        total = estimate(new, torch.tensor([-1.5, -1.0, -0.5]), given_weights).sum()
        (grad,) = torch.autograd.grad(total, new)
        factors = weights if given_weights is not None else (1.0, 1.0, 1.0)
        expected = [w * slope(d) for w, d in zip(factors, distances, strict=True)]
        assert grad.tolist() == pytest.approx(expected)
        assert not total.requires_grad or given_weights is None or given_weights.grad is None


@pytest.mark.parametrize("seed", range(3))
def test_gradients_agree_with_finite_differences(seed: int) -> None:
    new, ref, weights = (numbers(2, 4, seed=seed + i) for i in range(3))
    for estimate in (kl.k1, kl.k2, kl.k3, kl.absolute):
        assert torch.autograd.gradcheck(lambda x, e=estimate: e(x, ref, weights), new.clone().requires_grad_())
    assert torch.autograd.gradcheck(lambda x: kl.full(x, ref), new.clone().requires_grad_())


def test_clamping_stops_the_gradient() -> None:
    new = torch.tensor([-30.0, -4.0, -1.0], requires_grad=True)
    (grad,) = torch.autograd.grad(kl.k3(new, torch.zeros(3)).sum(), new)
    assert grad.tolist() == pytest.approx([0.0, 0.0, 1 - exp(1.0)])
    (grad,) = torch.autograd.grad(kl.k1(new, torch.zeros(3), limit=10.0).sum(), new)
    assert grad.tolist() == [0.0, 1.0, 1.0]


def test_weights_are_multiplied_before_clamping() -> None:
    new, ref = torch.tensor([-1.0, -1.0]), torch.tensor([-7.0, -7.0])
    assert kl.k1(new, ref, torch.tensor([2.0, 0.5]), limit=10.0).tolist() == [10.0, 3.0]


# ---- pitfalls


def test_p19_k3_is_exp_of_minus_d_and_not_of_d() -> None:
    """ColossalChat has exp(d) - 1 - d, which estimates nothing under the policy's samples."""
    policy_likes_it_more = kl.k3(torch.tensor([0.0]), torch.tensor([-2.0]))
    assert policy_likes_it_more.item() == pytest.approx(exp(-2.0) - 1 + 2.0)


def test_p18_log_probabilities_are_negative_and_k3_is_not() -> None:
    """A published walk-through prints +3.3213 for a log-probability of -3.3213; the estimate is of the negative one."""
    assert kl.k1(torch.tensor([-3.3213]), torch.tensor([-3.0])).item() == pytest.approx(-0.3213)
    assert kl.k3(torch.tensor([-3.3213]), torch.tensor([-3.0])).item() == pytest.approx(exp(0.3213) - 1 - 0.3213)
