"""What the experience of a step says, over all ranks. Shape legend: B rows, R response tokens of the longest."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algos.kl import k1
from megarl.algos.metrics import (
    correction_metrics,
    mismatch_metrics,
    objective_metrics,
    rollout_gap,
    value_metrics,
)
from megarl.algos.normalisation import Reduce, masked_moments
from megarl.config.schema import Algo
from megarl.megatron.aligned import Aligned
from megarl.megatron.credit import Credit
from megarl.types import ExperienceTerms


def experience_metrics(
    own: Aligned,
    earned: Credit,
    values: Tensor | None,
    corrected: Tensor | None,
    algo: Algo,
    terms: ExperienceTerms,
    reduce: Reduce,
    largest: Reduce,
) -> dict[str, float]:
    """The metrics of a rank's samples with those of all others, equal on all ranks; none over samples of no rank.

    Args:
        own: the samples.
        earned: by them.
        values: [B, R], by the critic, in the units of the rewards; None without one.
        corrected: [B, R], weights for rollouts of another policy; None where nothing is corrected.
        algo: of the run.
        terms: of the step.
        reduce, largest: sum and largest over the ranks; each calls equally often, with samples or without.
    """
    scored, counted = own.scored, own.counted
    scores = own.scores if own.dense is None else (earned.rewards - earned.penalties).sum(-1)
    drift = None if own.ref is None else k1(own.old, own.ref)[scored]
    kept = (scores[scored], own.old[scored], drift, earned.penalties[scored], own.mask[scored])
    metrics = {**objective_metrics(*kept, reduce=reduce), "objective/kl_coef": terms.kl_coef}
    if values is not None and earned.returns is not None:
        metrics |= value_metrics(earned.returns, values, counted, reduce=reduce)
    if algo.correction.old_logprobs == "recompute":
        metrics["rollout/logprob_gap"] = rollout_gap(own.old, own.rollout, own.mask, reduce=reduce)
        metrics |= mismatch_metrics(own.old, own.rollout, own.mask, reduce=reduce)
    if corrected is not None:
        metrics |= correction_metrics(corrected, own.old, own.rollout, own.mask, reduce=reduce)
    metrics |= spread("rewards", earned.rewards.sum(-1), scored, reduce, largest)
    metrics |= spread("advantages", earned.raw, counted, reduce, largest)
    age = spread("staleness", terms.version - own.versions, own.mask, reduce, largest)
    metrics |= {name: value for name, value in age.items() if not name.endswith("/min")}
    return metrics


def spread(name: str, values: Tensor, mask: Tensor, reduce: Reduce, largest: Reduce) -> dict[str, float]:
    """Mean, smallest and largest of what counts on all ranks; none of them where nothing does.

    Args:
        name: before ``/mean``, ``/min`` and ``/max``.
        values: any shape.
        mask: bool, same shape.
        reduce, largest: sum and largest over the ranks.
    """
    moments = masked_moments(values, mask, reduce)
    own = values[mask].double()
    ends = torch.stack([torch.cat([side, side.new_full((1,), -torch.inf)]).max() for side in (own, -own)])
    high, low = largest(ends).tolist()
    if not moments.count:
        return {}
    return {f"{name}/mean": float(moments.mean), f"{name}/min": -low, f"{name}/max": high}
