"""Rollout corrections against the oracle's loops, over ranks, and invariants."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.algos import metrics, registry, rollout_correction
from megarl.algos.normalization import Reduce
from megarl.algos.rollout_correction import m2po
from tests.algos.examples import MASK, tokens
from tests.algos.inputs import local, measured_on_ranks, numbers, on_ranks
from tests.oracle import corrections as naive

WEIGHTS = {name: registry.ROLLOUT_WEIGHTS.function(name) for name in registry.ROLLOUT_WEIGHTS.functions}
KINDS = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}
"""From d = log(rollout / old)."""
LEVELS = ("token", "sequence_sum", "sequence_mean", "sequence_max")
STATISTICS = [(level, kind) for level in LEVELS for kind in KINDS if (level, kind) != ("sequence_max", "k1")]


def rows(*columns: Tensor) -> list[list[list[float]]]:
    """The unmasked tokens of each column, by row; rows without any are dropped."""
    return [[own[row][mask].tolist() for own in columns] for row, mask in enumerate(MASK) if mask.any()]


def assert_equal_on_ranks(function: Callable[[slice, Reduce], Tensor], whole: Tensor) -> None:
    """Ranks that share the rows compute of them what one rank does."""
    for split in ([slice(0, 1), slice(1, 4)], [slice(0, 4), slice(0, 0)], [slice(1, 2), slice(2, 4), slice(0, 1)]):
        for part, own in zip(split, on_ranks(function, [(part,) for part in split]), strict=True):
            torch.testing.assert_close(own, whole[part])


@pytest.mark.parametrize("bounds", [(None, 1.2), (0.8, 1.3), (0.97, 1.03)], ids=str)
@pytest.mark.parametrize("name", WEIGHTS)
@given(seed=st.integers(0, 99))
def test_weights_equal_the_oracles(name: str, bounds: tuple[float | None, float], seed: int) -> None:
    old, rollout, _ = tokens(seed)
    lower, upper = bounds
    weights = WEIGHTS[name](old, rollout, MASK, local, upper=upper, lower=lower)
    assert not weights[~MASK].any()
    for own, before, sampled in rows(weights, old, rollout):
        assert own == pytest.approx(getattr(naive, name)(before, sampled, upper=upper, lower=lower or 0.0))


@pytest.mark.parametrize("name", WEIGHTS)
def test_batch_normalised_weights_have_mean_one_over_all_ranks(name: str) -> None:
    old, rollout, _ = tokens(4)

    def weigh(part: slice, reduce: Reduce) -> Tensor:
        return WEIGHTS[name](old[part], rollout[part], MASK[part], reduce, upper=1.3, batch_normalise=True)

    whole = weigh(slice(0, 4), local)
    plain = [own for (own,) in rows(WEIGHTS[name](old, rollout, MASK, local, upper=1.3))]
    expected = naive.normalised(plain, by_sequence=name.startswith("sequence") or name == "geometric_truncate")
    for (own,), other in zip(rows(whole), expected, strict=True):
        assert own == pytest.approx(other)
    assert_equal_on_ranks(weigh, whole)


def test_weights_carry_no_gradient_and_stay_finite() -> None:
    old = torch.tensor([[500.0, -500.0]], requires_grad=True)
    for weigh in WEIGHTS.values():
        weights = weigh(old, torch.zeros(1, 2), torch.ones(1, 2).bool(), local)
        assert not weights.requires_grad
        assert torch.isfinite(weights).all()


@pytest.mark.parametrize(("level", "kind"), STATISTICS)
@given(seed=st.integers(0, 99))
def test_rejection_equals_the_oracles(level: str, kind: str, seed: int) -> None:
    old, rollout, _ = tokens(seed)
    statistic: Any = f"{level}_{kind}"
    keep = rollout_correction.rejection(old, rollout, MASK, statistic=statistic, upper=1.1 if kind == "k1" else 0.1)
    assert not keep[~MASK].any()
    lower, upper = (math.log(1 / 1.1), math.log(1.1)) if kind == "k1" else (-math.inf, 0.1)
    options: Any = {"of": KINDS[kind], "level": level.removeprefix("sequence_"), "lower": lower, "upper": upper}
    for own, before, sampled in rows(keep.double(), old, rollout):
        assert own == naive.rejected(before, sampled, **options)


@given(seed=st.integers(0, 99))
def test_sequence_masks_equal_the_oracles(seed: int) -> None:
    new, rollout, advantages = tokens(seed)
    advantages = advantages[:, :1].expand_as(new)
    keep = rollout_correction.off_policy_sequences(new, rollout, advantages, MASK, delta=0.1)
    assert keep[1], "a response without tokens"
    for (one, *_), *columns in rows(keep.double().expand_as(new), advantages, new, rollout):
        assert one == naive.off_policy_sequence(*columns, delta=0.1)


# ---- M2PO


@given(st.integers(0, 999), st.floats(0.001, 2.0))
def test_m2po_keeps_the_same_tokens_as_sorting(seed: int, threshold: float) -> None:
    old, rollout, _ = tokens(seed)
    keep = m2po(old, rollout, MASK, local, threshold=threshold)
    naive_keep = naive.second_moment([r for (r,) in rows(rollout - old)], threshold=threshold)
    kept = [own for (own,) in rows(keep.double())]
    if any(map(any, naive_keep)):
        assert kept == naive_keep
    else:
        squares = (rollout - old).square()[MASK]
        assert keep.sum() == 1, "where not even the smallest is small enough, it stays alone"
        assert (rollout - old).square()[keep] == squares.min()


def test_m2po_does_not_depend_on_the_ranks() -> None:
    old, rollout, _ = tokens(0)
    whole = m2po(old, rollout, MASK, local, threshold=0.05)
    assert whole.any()
    assert (MASK & ~whole).any()
    assert_equal_on_ranks(
        lambda part, reduce: m2po(old[part], rollout[part], MASK[part], reduce, threshold=0.05), whole
    )


def test_m2po_of_no_tokens_and_of_equal_policies() -> None:
    old = numbers(2, 3, seed=0)
    assert not m2po(old, old, torch.zeros(2, 3).bool(), local).any()
    assert m2po(old, old, torch.ones(2, 3).bool(), local).all()
    apart = m2po(old, old + 1.0, torch.ones(2, 3).bool(), local, threshold=0.5)
    assert apart.any(), "the smallest stays"


# ---- the proximal policy, without a forward pass


@pytest.mark.parametrize("method", ["loglinear", "linear"])
def test_the_proximal_policy_lies_between_rollout_and_newest(method: Any) -> None:
    new, rollout, _ = tokens(0)
    versions = torch.tensor([[-1, 3, 5, 7, 8, 9]]).expand_as(new)
    alpha = rollout_correction.proximal_weights(versions, 8)
    assert alpha[0].tolist() == pytest.approx([0.0, 0.8, 2 / 3, 0.0, 0.0, 0.0])
    proximal = rollout_correction.proximal_logprobs(rollout, new.requires_grad_(), alpha.double(), method=method)
    assert not proximal.requires_grad
    torch.testing.assert_close(proximal[:, [0, 3, 4, 5]], rollout[:, [0, 3, 4, 5]])
    low, high = torch.minimum(new, rollout), torch.maximum(new, rollout)
    assert ((low < proximal) & (proximal < high))[:, 1:3].all()
    if method == "loglinear":
        expected = naive.between(rollout[0, 1:].tolist(), new[0, 1:].tolist(), versions[0, 1:].tolist(), current=8)
        assert proximal[0, 1:].tolist() == pytest.approx(expected)
    else:
        torch.testing.assert_close(proximal.exp(), (1 - alpha) * rollout.exp() + alpha * new.detach().exp())


# ---- metrics


@pytest.mark.parametrize("measure", ["mismatch", "correction"])
def test_metrics_are_summed_over_ranks(measure: str) -> None:
    old, rollout, _ = tokens(0)
    weights = WEIGHTS["token_mask"](old, rollout, MASK, local, upper=1.2)

    def of(part: slice, reduce: Reduce) -> dict[str, float]:
        if measure == "mismatch":
            return metrics.averaged(metrics.mismatch(old[part], rollout[part], MASK[part]), reduce)
        return metrics.correction_metrics(weights[part], old[part], rollout[part], MASK[part], reduce=reduce)

    assert measured_on_ranks(of)


def test_the_same_policy_needs_no_correction() -> None:
    old = torch.where(MASK, numbers(*MASK.shape, seed=0), float("nan"))
    told = metrics.averaged(metrics.mismatch(old, old, MASK), local)
    assert told.pop("rollout_corr/training_ppl") == told.pop("rollout_corr/rollout_ppl")
    ones = ("rollout_corr/ppl_ratio", "rollout_corr/mult_prob_error")
    assert told == {name: 1.0 if name in ones else 0.0 for name in told}
    weights = WEIGHTS["token_truncate"](old, old, MASK, local)
    told = metrics.correction_metrics(weights, old, old, MASK, reduce=local)
    none = ("rollout_corr/changed_fraction", "rollout_corr/kept_log_ratio")
    assert told == pytest.approx({name: 0.0 if name in none else 1.0 for name in told})
