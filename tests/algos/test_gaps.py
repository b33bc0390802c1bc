"""Masks with gaps: what a function computes is the same where the tokens that do not count are absent.

A run has them absent: `data.packing` leaves the given tokens of conversations out of all columns.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from torch import Tensor

from megarl.algos.advantages import broadcast_advantages
from megarl.algos.metrics import mismatch, objective_metrics
from megarl.algos.normalization import Groups, whiten_rewards
from megarl.algos.registry import (
    AGGREGATIONS,
    NORMALISERS,
    POLICY_LOSSES,
    ROLLOUT_WEIGHTS,
    TOKEN_ADVANTAGES,
    VALUE_LOSSES,
    bound,
)
from megarl.algos.reward_shaping import dense_rewards, kl_penalties, token_rewards
from megarl.algos.rollout_correction import m2po, off_policy_sequences, rejection
from megarl.experience.padded_batch import align, response_mask
from tests.algos.inputs import local, masks, numbers, seeds

Case = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]
OPTIONS = {"sequence_sum_norm": {"tokens": 4}}


def per_row(values: Tensor, mask: Tensor) -> Tensor:
    """A number of each row that does not depend on where its tokens are, [B]."""
    return (values * mask).sum(-1)


def groups(mask: Tensor) -> Groups:
    return Groups(index=torch.arange(len(mask)) // 2, count=(len(mask) + 1) // 2)


def totals(mask: Tensor) -> dict[str, int]:
    return {"total_tokens": int(mask.sum()), "total_sequences": int(mask.any(-1).sum())}


def policy_terms(name: str, new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """The terms of a policy loss, with the arguments that it names."""
    inputs = {**dict.fromkeys(POLICY_LOSSES.arguments, old), "new_logprobs": new, "advantages": advantages}
    inputs["response_mask"] = mask
    return bound(POLICY_LOSSES, name, {})(**{key: inputs[key] for key in POLICY_LOSSES.reads(name)}).values


CASES: dict[str, Case] = {
    **{
        name: lambda a, b, _, mask, name=name: bound(TOKEN_ADVANTAGES, name, {})(a, b, mask)
        for name in TOKEN_ADVANTAGES.functions
    },
    **{
        name: lambda a, _, __, mask, name=name: (bound(NORMALISERS, name, {})(a, mask, groups(mask), local),)
        for name in NORMALISERS.functions
    },
    **{name: lambda a, b, c, mask, name=name: (policy_terms(name, a, b, c, mask),) for name in POLICY_LOSSES.functions},
    **{
        f"value {name}": lambda a, b, c, _, name=name: (bound(VALUE_LOSSES, name, {})(a, b, c).values,)
        for name in VALUE_LOSSES.functions
    },
    **{
        name: lambda _, __, ___, mask, name=name: (
            bound(AGGREGATIONS, name, OPTIONS.get(name, {}))(mask, **totals(mask)),
        )
        for name in AGGREGATIONS.functions
    },
    **{
        f"weights {name}": lambda a, b, _, mask, name=name: (bound(ROLLOUT_WEIGHTS, name, {})(a, b, mask, local),)
        for name in ROLLOUT_WEIGHTS.functions
    },
    "m2po": lambda a, b, _, mask: (m2po(a, b, mask, local, threshold=0.5),),
    "rejection": lambda a, b, _, mask: (rejection(a, b, mask, statistic="sequence_mean_k1", upper=0.1),),
    "off_policy_sequences": lambda a, b, c, mask: (
        off_policy_sequences(a, b, per_row(c, mask)[:, None].expand_as(a), mask).expand_as(a),
    ),
    "token_rewards": lambda a, _, c, mask: (token_rewards(per_row(a, mask), kl_penalties(c, mask, kl_coef=0.3), mask),),
    "dense_rewards": lambda a, b, c, mask: (dense_rewards(a, b, c, mask, differences=True),),
    "broadcast_advantages": lambda a, _, c, mask: (broadcast_advantages(per_row(a, mask), c, mask),),
    "whiten_rewards": lambda a, _, __, mask: (whiten_rewards(a, mask, local),),
}


@pytest.mark.parametrize("name", CASES)
@given(mask=masks, seed=seeds)
def test_tokens_that_do_not_count_may_be_absent(name: str, mask: list[list[bool]], seed: int) -> None:
    gaps = torch.tensor(mask)
    dense = response_mask(gaps.sum(-1))
    columns = [numbers(*gaps.shape, seed=seed + i) for i in range(3)]
    without = CASES[name](*(align(column[gaps], dense) for column in columns), dense)
    for found, expected in zip(CASES[name](*columns, gaps), without, strict=True):
        torch.testing.assert_close(found[gaps], expected[dense], rtol=1e-12, atol=1e-12)


@given(mask=masks, seed=seeds)
def test_metrics_are_of_counting_tokens(mask: list[list[bool]], seed: int) -> None:
    gaps = torch.tensor(mask)
    dense = response_mask(gaps.sum(-1))
    columns = [numbers(*gaps.shape, seed=seed + i) for i in range(2)]

    def measured(one: Tensor, other: Tensor, own: Tensor) -> dict[str, float]:
        quotients = {name: float(total / count) for name, (total, count) in mismatch(one, other, own).items() if count}
        penalties = kl_penalties(other, own, kl_coef=1.0)
        return {**quotients, **objective_metrics(per_row(one, own), penalties, own, reduce=local)}

    found = measured(*columns, gaps)
    assert found == pytest.approx(measured(*(align(column[gaps], dense) for column in columns), dense), rel=1e-9)
