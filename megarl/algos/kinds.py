"""The kinds of functions that a configuration chooses from: what each is called with, a user's own as well."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from megarl.algos import registry


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Functions that one field chooses from. All of them are given their options by keyword.

    Args:
        title: what they are.
        field: of the configuration.
        functions: by name.
        arguments: of every call, by position.
        further: arguments by position that only some calls have, each with the field that asks for it.
        keywords: of every call, by name.
        returns: what they return.
        level: of a field whose own functions are of two kinds: what they say of themselves; None elsewhere.
        own: whether the field takes functions of the user's own.
    """

    title: str
    field: str
    functions: Mapping[str, Callable[..., Any]]
    arguments: tuple[str, ...]
    further: tuple[tuple[str, str], ...] = ()
    keywords: tuple[str, ...] = ()
    returns: str
    level: str | None = None
    own: bool = True


FIXED: Final = ("dtype", "log_clamp")
"""Keyword arguments that are no choice: what is computed in, and what keeps exponentials finite."""

KINDS: Final[tuple[Kind, ...]] = (
    Kind(
        title="Advantages of tokens",
        field="algo.advantage",
        functions=registry.TOKEN_ADVANTAGES,
        arguments=("rewards", "values", "response_mask"),
        returns="advantages and returns, [B, R] each, 0 off the mask",
        level="token",
    ),
    Kind(
        title="Advantages of samples",
        field="algo.advantage",
        functions=registry.COMPARISONS,
        arguments=("samples",),
        returns="[N] floats, in the order of the samples, 0 for those without a score",
        level="sample",
    ),
    Kind(
        title="Normalisation of advantages",
        field="algo.normalise.advantages",
        functions=registry.NORMALISERS,
        arguments=("advantages", "response_mask", "groups", "reduce"),
        returns="[B, R], 0 off the mask",
    ),
    Kind(
        title="Policy losses",
        field="algo.policy_loss",
        functions=registry.POLICY_LOSSES,
        arguments=("new_logprobs", "old_logprobs", "advantages", "response_mask"),
        returns="`LossTerms`, its values [B, R]",
    ),
    Kind(
        title="Value losses",
        field="algo.value_loss",
        functions=registry.VALUE_LOSSES,
        arguments=("values", "old_values", "returns"),
        returns="`LossTerms`, its values [B, R]",
    ),
    Kind(
        title="Aggregation",
        field="algo.aggregation",
        functions=registry.AGGREGATIONS,
        arguments=("response_mask",),
        keywords=("total_tokens", "total_sequences"),
        returns="weights [B, R] of the token losses, whose weighted sum over the optimizer step is the loss",
    ),
    Kind(
        title="KL estimates",
        field="algo.kl.estimator",
        functions=registry.KL_ESTIMATORS,
        arguments=("logprobs", "ref_logprobs"),
        further=(("importance", "algo.kl.importance"),),
        returns="[B, R] nats",
    ),
    Kind(
        title="Responses without an end",
        field="algo.scores.missing_end",
        functions=registry.MISSING_ENDS,
        arguments=("scores", "finished"),
        returns="[N]",
        own=False,
    ),
    Kind(
        title="Weights of rollouts",
        field="algo.correction.weights",
        functions=registry.ROLLOUT_WEIGHTS,
        arguments=("old_logprobs", "rollout_logprobs", "response_mask", "reduce"),
        returns="[B, R], without a gradient, 0 off the mask",
    ),
    Kind(
        title="Filters of prompts",
        field="algo.filter",
        functions=registry.FILTERS,
        arguments=("scores",),
        returns="a bool, whether the prompt is kept",
    ),
    Kind(
        title="Losses of reward models",
        field="reward.loss",
        functions=registry.PREFERENCE_LOSSES,
        arguments=("chosen", "rejected"),
        returns="`LossTerms`, its values [P]",
    ),
)
