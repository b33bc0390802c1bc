"""What the names of a configuration stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol, TypeVar

import torch
from torch import Tensor

from megarl.algos.advantages import gae, grpo
from megarl.algos.aggregation import sequence_mean, token_mean
from megarl.algos.kl import k1, k2, k3
from megarl.algos.policy import ppo
from megarl.algos.terms import LossTerms

T = TypeVar("T")


class PolicyLoss(Protocol):
    """See policy.ppo."""

    def __call__(
        self,
        new_logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        *,
        clip: float,
    ) -> LossTerms: ...


class Aggregation(Protocol):
    """See aggregation.token_mean."""

    def __call__(
        self, response_mask: Tensor, *, total_tokens: int, total_sequences: int, dtype: torch.dtype = ...
    ) -> Tensor: ...


class Advantages(Protocol):
    """See advantages.gae."""

    def __call__(
        self, rewards: Tensor, values: Tensor, response_mask: Tensor, *, gamma: float, lam: float
    ) -> tuple[Tensor, Tensor]: ...


class OutcomeAdvantages(Protocol):
    """See advantages.grpo."""

    def __call__(self, scores: Tensor, groups: Tensor) -> Tensor: ...


KL_ESTIMATORS: Final[Mapping[str, Callable[[Tensor, Tensor], Tensor]]] = {"k1": k1, "k2": k2, "k3": k3}
ADVANTAGES: Final[Mapping[str, Advantages]] = {"gae": gae}
OUTCOME_ADVANTAGES: Final[Mapping[str, OutcomeAdvantages]] = {"grpo": grpo}
POLICY_LOSSES: Final[Mapping[str, PolicyLoss]] = {"clip": ppo}
AGGREGATIONS: Final[Mapping[str, Aggregation]] = {"token_mean": token_mean, "sequence_mean": sequence_mean}


def choose(table: Mapping[str, T], name: str, field: str) -> T:
    """The entry of that name.

    Args:
        table: one of the tables above.
        name: what the configuration says.
        field: where it says so, for the message.

    Raises:
        ValueError: no such entry; the message lists the names there are.
    """
    if name not in table:
        raise ValueError(f"{field} is {name!r}: it must be one of {', '.join(sorted(table))}")
    return table[name]
