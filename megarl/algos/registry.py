"""What the names of a configuration stand for. A user's own function is named ``package.module:function``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeVar, cast

from torch import Tensor

from megarl.algos import (
    advantages,
    aggregation,
    comparisons,
    corrections,
    kl,
    normalisers,
    policy,
    preference,
    scores,
    selection,
    values,
)
from megarl.algos.terms import LossTerms
from megarl.plugins import resolve

F = TypeVar("F", bound=Callable[..., Any])


TOKEN_ADVANTAGES: Final[Mapping[str, Callable[..., tuple[Tensor, Tensor]]]] = {
    "gae": advantages.gae,
    "vapo": advantages.vapo,
    "reinforce": advantages.reinforce,
    "reinforce_pp": advantages.reinforce,
}
COMPARISONS: Final[Mapping[str, Callable[..., Tensor]]] = {
    "grpo": comparisons.grpo,
    "dr_grpo": comparisons.dr_grpo,
    "reinforce_pp_baseline": comparisons.dr_grpo,
    "rloo": comparisons.rloo,
    "rloo_std": comparisons.rloo_std,
    "masked_rloo": comparisons.masked_rloo,
    "opo": comparisons.opo,
    "pass_at_k": comparisons.pass_at_k,
    "batch_std": comparisons.batch_std,
    "gpg": comparisons.gpg,
    "remax": comparisons.remax,
    "gdpo": comparisons.gdpo,
}
NORMALISERS: Final[Mapping[str, Callable[..., Tensor]]] = {
    "whiten": normalisers.whiten_advantages,
    "grouped_tokens": normalisers.grouped_tokens,
    "levels": normalisers.levels,
}
KL_ESTIMATORS: Final[Mapping[str, Callable[..., Tensor]]] = {
    "k1": kl.k1,
    "k2": kl.k2,
    "k3": kl.k3,
    "abs": kl.absolute,
    "k1+": kl.k1_plus,
    "k3+": kl.k3_plus,
    "full": kl.full,
}
POLICY_LOSSES: Final[Mapping[str, Callable[..., LossTerms]]] = {
    "ppo": policy.ppo,
    "gspo": policy.gspo,
    "cispo": policy.cispo,
    "cispo_upper": policy.cispo_upper,
    "sapo": policy.sapo,
    "gmpo": policy.gmpo,
    "reinforce": policy.reinforce,
}
VALUE_LOSSES: Final[Mapping[str, Callable[..., LossTerms]]] = {"mse": values.mse, "huber": values.huber}
AGGREGATIONS: Final[Mapping[str, Callable[..., Tensor]]] = {
    "token_mean": aggregation.token_mean,
    "token_sum": aggregation.token_sum,
    "sequence_mean": aggregation.sequence_mean,
    "sequence_sum": aggregation.sequence_sum,
    "sequence_sum_norm": aggregation.sequence_sum_norm,
}
ROLLOUT_WEIGHTS: Final[Mapping[str, Callable[..., Tensor]]] = {
    "token_truncate": corrections.token_truncate,
    "token_mask": corrections.token_mask,
    "sequence_truncate": corrections.sequence_truncate,
    "sequence_mask": corrections.sequence_mask,
    "geometric_truncate": corrections.geometric_truncate,
    "geometric_mask": corrections.geometric_mask,
}
MISSING_ENDS: Final[Mapping[str, Callable[..., Tensor]]] = {
    "replace": scores.replace_missing_end,
    "subtract": scores.subtract_missing_end,
    "scale": scores.scale_missing_end,
    "zero": scores.zero_missing_end,
}
FILTERS: Final[Mapping[str, Callable[..., bool]]] = {
    "nonzero_std": selection.nonzero_std,
    "open_range": selection.open_range,
}
PREFERENCE_LOSSES: Final[Mapping[str, Callable[..., LossTerms]]] = {
    "pairwise": preference.pairwise,
    "best_of_n": preference.best_of_n,
    "span": preference.span,
}


def bound(table: Mapping[str, F], name: str, options: Mapping[str, Any]) -> F:
    """The function of that name with its options.

    Args:
        table: one of the tables above.
        name: of an entry, or ``package.module:function``.
        options: keyword arguments.

    Raises:
        ValueError: a function of the user's own that there is not; see plugins.resolve.
    """
    function = table[name] if name in table else resolve(name)
    return cast(F, partial(function, **options))
