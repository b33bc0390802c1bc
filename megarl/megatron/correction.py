"""Corrections for rollouts of another policy, and which tokens actor and critic learn nothing from.

Weights are factors of the policy loss. What is left out is so in every term of the loss, the penalty and the bonus as
well; the denominators stay. Shape legend: B rows, R response tokens of the longest.
"""

from __future__ import annotations

from torch import Tensor

from megarl.algos.corrections import rejection
from megarl.algos.m2po import m2po
from megarl.algos.normalisation import Reduce
from megarl.algos.registry import ROLLOUT_WEIGHTS, bound
from megarl.algos.scores import keep_finished
from megarl.config.schema import Correction
from megarl.megatron.aligned import Aligned


def correction_weights(own: Aligned, correction: Correction, reduce: Reduce) -> Tensor | None:
    """[B, R], 0 off the mask: the weights of the rollouts; None without any that are known before the update.

    Args:
        own: the samples of a rank.
        correction: of the algorithm.
        reduce: called equally often on every rank, with samples or without.
    """
    if correction.weights is None or correction.old_logprobs != "recompute":
        return None
    weigh = bound(ROLLOUT_WEIGHTS, correction.weights.name, correction.weights.options)
    return weigh(own.old, own.rollout, own.mask, reduce)


def trusted_tokens(own: Aligned, correction: Correction, reduce: Reduce) -> Tensor | None:
    """[B, R] bool, False off the mask: the tokens that all trust regions keep; None without any.

    Args:
        own, correction, reduce: see ``correction_weights``.
    """
    if not correction.reject and correction.m2po is None:
        return None
    columns, trusted = (own.old, own.rollout, own.mask), own.mask
    for bounds in correction.reject:
        trusted = trusted & rejection(*columns, statistic=bounds.statistic, upper=bounds.upper, lower=bounds.lower)
    if correction.m2po is not None:
        trusted = trusted & m2po(*columns, reduce, threshold=correction.m2po.threshold)
    return trusted


def kept_tokens(own: Aligned, trusted: Tensor | None, reduce: Reduce) -> Tensor | None:
    """[B, R] bool: what the actor learns from; None where that is everything on all ranks."""
    left_out = _any(~own.learnt, reduce)
    if trusted is None and not left_out:
        return None
    kept = keep_finished(own.mask, own.learnt)
    return kept if trusted is None else kept & trusted


def value_kept_tokens(own: Aligned, reduce: Reduce) -> Tensor | None:
    """[B, R] bool: what the critic learns from, the responses with a score; None where that is all of them."""
    return own.counted if _any(~own.scored, reduce) else None


def _any(rows: Tensor, reduce: Reduce) -> bool:
    """Whether it holds for a row of any rank."""
    return bool(reduce(rows.sum().double().reshape(1)) > 0)
