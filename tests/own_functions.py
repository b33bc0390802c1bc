"""Custom functions of users, some with mistakes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.algos.advantages import gae
from megarl.algos.curriculum import History
from megarl.algos.group_advantages import Samples
from megarl.algos.kl import k2
from megarl.algos.normalization import Groups, Reduce, levels
from megarl.algos.policy_loss import LossTerms
from megarl.algos.rollout_correction import rollout_weights

NOT_A_FUNCTION = 3


def above_the_median(samples: Samples, *, scale: float = 1.0) -> Tensor:
    """A comparison."""
    return scale * (samples.scores - samples.scores.median())


def last_reward(rewards: Tensor, values: Tensor | None, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages of tokens."""
    return torch.where(response_mask, rewards, 0), rewards


def halved(advantages: Tensor, response_mask: Tensor, groups: Any, reduce: Any) -> Tensor:
    """A normaliser."""
    return advantages / 2


def quadratic(new_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, power: int) -> LossTerms:
    """A policy loss."""
    return LossTerms(values=-advantages * (new_logprobs - old_logprobs) ** power, metrics={})


def anchored(new_logprobs: Tensor, ref_logprobs: Tensor, values: Tensor, entropy: Tensor) -> LossTerms:
    """A policy loss of other inputs."""
    return LossTerms(values=(new_logprobs - ref_logprobs) * values - entropy, metrics={})


def plain_mean(response_mask: Tensor, *, total_tokens: int, total_sequences: int) -> Tensor:
    """An aggregation."""
    return response_mask / total_tokens


def of_two(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """An estimator without importance weights."""
    return logprobs - ref_logprobs


def easy(scores: Tensor, *, least: float) -> bool:
    """A filter."""
    return bool(scores.mean() > least)


async def later(samples: Samples) -> Tensor:
    """Not a plain function."""
    return samples.scores


# ---- built-in functions under other names, with the same results


def same_gae(rewards: Tensor, values: Tensor | None, response_mask: Tensor, *, lam: float) -> tuple[Tensor, Tensor]:
    assert values is not None
    return gae(rewards, values, response_mask, lam=lam)


def same_levels(advantages: Tensor, response_mask: Tensor, groups: Groups, reduce: Reduce) -> Tensor:
    return levels(advantages, response_mask, groups, reduce, std="group")


def same_k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    return k2(logprobs, ref_logprobs)


def same_truncation(
    old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor, reduce: Reduce, *, upper: float
) -> Tensor:
    return rollout_weights(
        old_logprobs, rollout_logprobs, response_mask, reduce, level="token", rule="truncate", upper=upper
    )


def every_other(history: History, count: int, random: np.random.Generator, *, shift: float = 0) -> Any:
    """A curriculum."""
    return np.arange(count) * 2 % len(history.steps) + shift
