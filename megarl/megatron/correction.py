"""What the loss of each token is multiplied with: corrections for rollouts of another policy, and what is left out.

Shape legend: B rows, R response tokens of the longest.
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


def corrects(correction: Correction) -> bool:
    """Whether weights or masks are made of log-probabilities that are known before the update."""
    asked = correction.weights is not None or bool(correction.reject) or correction.m2po is not None
    return asked and correction.old_logprobs == "recompute"


def correction_weights(own: Aligned, correction: Correction, reduce: Reduce) -> Tensor | None:
    """[B, R], 0 off the mask: the weights of the rollouts, times what the trust regions keep; None without either.

    Args:
        own: the samples of a rank.
        correction: of the algorithm.
        reduce: called equally often on every rank, with samples or without.
    """
    if not corrects(correction):
        return None
    columns = own.old, own.rollout, own.mask
    weights = own.mask.float()
    if correction.weights is not None:
        weights = bound(ROLLOUT_WEIGHTS, correction.weights.name, correction.weights.options)(*columns, reduce)
    for bounds in correction.reject:
        weights = weights * rejection(*columns, statistic=bounds.statistic, upper=bounds.upper, lower=bounds.lower)
    if correction.m2po is not None:
        weights = weights * m2po(*columns, reduce, threshold=correction.m2po.threshold)
    return weights


def policy_weights(own: Aligned, corrected: Tensor | None, reduce: Reduce) -> Tensor | None:
    """[B, R]: the corrections on what the policy learns of, 0 on what it does not; None where that is 1 everywhere."""
    left_out = _any(~own.learnt, reduce)
    if corrected is None and not left_out:
        return None
    kept = keep_finished(own.mask, own.learnt).float()
    return kept if corrected is None else corrected * kept


def value_weights(own: Aligned, reduce: Reduce) -> Tensor | None:
    """[B, R]: 0 on samples without a score, 1 on the others; None where all have one."""
    return own.counted.float() if _any(~own.scored, reduce) else None


def _any(rows: Tensor, reduce: Reduce) -> bool:
    """Whether it holds for a row of any rank."""
    return bool(reduce(rows.sum().double().reshape(1)) > 0)
