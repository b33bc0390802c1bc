"""What the names of a configuration stand for. A user's own function is named ``package.module:function``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeVar, cast

from torch import Tensor

from megarl.algos import (
    advantages,
    aggregation,
    group_advantages,
    kl,
    normalization,
    policy_loss,
    preference_loss,
    reward_shaping,
    rollout_correction,
    selection,
    value_loss,
)
from megarl.algos.policy_loss import LossTerms
from megarl.plugins import resolve

F = TypeVar("F", bound=Callable[..., Any])


TOKEN_ADVANTAGES: Final[Mapping[str, Callable[..., tuple[Tensor, Tensor]]]] = {
    "gae": advantages.gae,
    "vapo": advantages.vapo,
    "reinforce": advantages.reinforce,
    "reinforce_pp": advantages.reinforce,
}
COMPARISONS: Final[Mapping[str, Callable[..., Tensor]]] = {
    "grpo": group_advantages.grpo,
    "dr_grpo": group_advantages.dr_grpo,
    "reinforce_pp_baseline": group_advantages.dr_grpo,
    "rloo": group_advantages.rloo,
    "rloo_std": group_advantages.rloo_std,
    "masked_rloo": group_advantages.masked_rloo,
    "opo": group_advantages.opo,
    "pass_at_k": group_advantages.pass_at_k,
    "batch_std": group_advantages.batch_std,
    "gpg": group_advantages.gpg,
    "remax": group_advantages.remax,
    "gdpo": group_advantages.gdpo,
}
NORMALISERS: Final[Mapping[str, Callable[..., Tensor]]] = {
    "whiten": normalization.whiten_advantages,
    "grouped_tokens": normalization.grouped_tokens,
    "levels": normalization.levels,
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
    "ppo": policy_loss.ppo,
    "gspo": policy_loss.gspo,
    "cispo": policy_loss.cispo,
    "cispo_upper": policy_loss.cispo_upper,
    "sapo": policy_loss.sapo,
    "gmpo": policy_loss.gmpo,
    "reinforce": policy_loss.reinforce,
}
VALUE_LOSSES: Final[Mapping[str, Callable[..., LossTerms]]] = {"mse": value_loss.mse, "huber": value_loss.huber}
AGGREGATIONS: Final[Mapping[str, Callable[..., Tensor]]] = {
    "token_mean": aggregation.token_mean,
    "token_sum": aggregation.token_sum,
    "sequence_mean": aggregation.sequence_mean,
    "sequence_sum": aggregation.sequence_sum,
    "sequence_sum_norm": aggregation.sequence_sum_norm,
}
ROLLOUT_WEIGHTS: Final[Mapping[str, Callable[..., Tensor]]] = {
    "token_truncate": rollout_correction.token_truncate,
    "token_mask": rollout_correction.token_mask,
    "sequence_truncate": rollout_correction.sequence_truncate,
    "sequence_mask": rollout_correction.sequence_mask,
    "geometric_truncate": rollout_correction.geometric_truncate,
    "geometric_mask": rollout_correction.geometric_mask,
}
MISSING_ENDS: Final[Mapping[str, Callable[..., Tensor]]] = {
    "replace": reward_shaping.replace_missing_end,
    "subtract": reward_shaping.subtract_missing_end,
    "scale": reward_shaping.scale_missing_end,
    "zero": reward_shaping.zero_missing_end,
}
FILTERS: Final[Mapping[str, Callable[..., bool]]] = {
    "nonzero_std": selection.nonzero_std,
    "open_range": selection.open_range,
}
PREFERENCE_LOSSES: Final[Mapping[str, Callable[..., LossTerms]]] = {
    "pairwise": preference_loss.pairwise,
    "best_of_n": preference_loss.best_of_n,
    "span": preference_loss.span,
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
