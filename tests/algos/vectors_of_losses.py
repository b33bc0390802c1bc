"""Vectors of losses, their aggregation, and rollout corrections; see vector_adapter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megarl.algos import metrics, preference_loss, registry, rollout_correction
from megarl.algos.aggregation import token_mean, weighted_sum
from megarl.algos.kl import k1
from megarl.algos.optimization import ptx_shares
from megarl.algos.policy_loss import LossTerms, ppo, row_mean, weighted, with_term
from tests.algos.inputs import local

Outputs = dict[str, Any]
AGGREGATIONS = {
    "token-mean": "token_mean",
    "token-sum": "token_sum",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "sequence_sum_norm",
}
NAMES = {"eps_low": "clip", "eps_high": "clip_high", "adv": "advantages"}
"""Ours of the format's."""


def totals(mask: Tensor) -> dict[str, Any]:
    return {
        "total_tokens": int(mask.sum()),
        "total_sequences": int(mask.any(-1).sum()),
        "dtype": torch.get_default_dtype(),
    }


def step_weights(mask: Tensor, mode: str, constant: int | None, rows: Any = slice(None)) -> Tensor:
    """The weights of some rows of the step with this mask."""
    options = {"tokens": constant or mask.shape[1]} if mode == "seq-mean-token-sum-norm" else {}
    return registry.AGGREGATIONS.function(AGGREGATIONS[mode])(mask[rows], **totals(mask), **options)


def mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean over the tokens of the step."""
    return weighted_sum(values, token_mean(mask, **totals(mask)))


def aggregate(*, loss: Tensor, mask: Tensor, mode: str = "token-mean", norm_const: int | None = None) -> Outputs:
    return {"loss": weighted_sum(loss, step_weights(mask, mode, norm_const))}


def aggregate_layout(
    *, loss: Tensor, mask: Tensor, layout: list[list[list[int]]], mode: str = "token-mean", cp: int = 1
) -> Outputs:
    """Context parallelism (``cp``) is not supported: a response is on one rank."""
    del cp
    parts = [rows for rank in layout for rows in rank]
    effective = sum(weighted_sum(loss[rows], step_weights(mask, mode, None, rows)) for rows in parts)
    return {"global": weighted_sum(loss, step_weights(mask, mode, None)), "effective": effective}


def policy_loss(
    *,
    new: Tensor,
    old: Tensor,
    adv: Tensor,
    mask: Tensor,
    variant: str = "ppo",
    agg: str = "token-mean",
    norm_const: int | None = None,
    **options: Any,
) -> Outputs:
    options = {NAMES.get(name, name): value for name, value in options.items()}
    if variant == "cispo_upper":
        options = {"max_ratio": options["clip_high"]}
    if variant == "gmpo":
        agg = "seq-mean-token-mean"
    if variant in ("ppo", "gspo", "cispo", "gmpo"):
        options = {"clip": 0.2, "clip_high": None, **options}
    loss = registry.POLICY_LOSSES.function(variant)(new.requires_grad_(), old, adv, mask, **options)
    total = weighted_sum(loss.values, step_weights(mask, agg, norm_const))
    outputs = {"loss": total, "grad": torch.autograd.grad(total, new)[0], **policy_metrics(loss, mask)}
    if "sequence_ratio" in loss.metrics:
        outputs["ratio_seq"] = loss.metrics["sequence_ratio"][:, 0]
    return outputs


def policy_metrics(loss: LossTerms, mask: Tensor) -> dict[str, Any]:
    ratio = loss.spreads["ratio"]
    return {
        **{name: mean(loss.metrics[name], mask) for name in ("clipfrac", "clipfrac_lower", "ppo_kl", "approxkl")},
        "ratio_mean": mean(ratio, mask),
        "ratio_max": ratio[mask].max(),
        "ratio_min": ratio[mask].min(),
    }


def decoupled_policy_loss(
    *,
    new: Tensor,
    prox: Tensor,
    behav: Tensor,
    adv: Tensor,
    mask: Tensor,
    cap: float = float("inf"),
    eps_high: float | None = None,
    dual_clip: float | None = None,
) -> Outputs:
    """PPO around the proximal policy, with weights of the rollout correction."""
    weights = rollout_correction.rollout_weights(prox, behav, mask, local, level="token", rule="mask", upper=cap)
    loss = ppo(new.requires_grad_(), prox, adv, mask, clip_high=eps_high, dual_clip=dual_clip)
    total = mean(weighted(loss, weights).values, mask)
    corrected = metrics.correction_metrics(weights, prox, behav, mask, reduce=local)
    return {
        "loss": total,
        "grad": torch.autograd.grad(total, new)[0],
        **policy_metrics(loss, mask),
        "behave_weight_mean": corrected["rollout_corr/kept_weight_mean"],
        "behave_kl_mean": corrected["rollout_corr/kept_log_ratio"],
        "kept_fraction": corrected["rollout_corr/kept_fraction"],
    }


def value_loss(
    *, values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, loss_type: str = "mse", **options: Any
) -> Outputs:
    loss = registry.VALUE_LOSSES.function(loss_type)(values.requires_grad_(), old_values, returns, **options)
    total = mean(loss.values, mask)
    found = {name: mean(loss.metrics[name], mask) for name in ("clipfrac", "error", "vpred")}
    return {"loss": total, "grad": torch.autograd.grad(total, values)[0], **found}


def combine_actor_loss(*, pg: float, entropy: float, entropy_coef: float, kl: float, kl_coef: float) -> Outputs:
    loss = LossTerms(values=torch.tensor(pg), metrics={})
    loss = with_term(loss, "entropy", torch.tensor(entropy), coef=-entropy_coef)
    return {"loss": with_term(loss, "kl", torch.tensor(kl), coef=kl_coef).values}


def ptx_mix(*, pg: float, ptx: float, coef: float, mode: Any) -> Outputs:
    return {"loss": weighted_sum(torch.tensor([pg, ptx]), torch.tensor(ptx_shares(coef=coef, mode=mode)))}


# ---- the reward model


def mean_of_pairs(values: Tensor) -> Tensor:
    """A pair is a sequence of one token."""
    return mean(values[:, None], torch.ones_like(values[:, None]).bool())


def rm_pairwise(*, chosen: Tensor, rejected: Tensor, margin: Tensor | None = None, **options: Any) -> Outputs:
    if margin is not None:
        options |= {"margins": margin, "margin": True}
    loss = preference_loss.pairwise(chosen.requires_grad_(), rejected.requires_grad_(), **options)
    total = mean_of_pairs(loss.values)
    grad_chosen, grad_rejected = torch.autograd.grad(total, (chosen, rejected))
    return {
        "loss": total,
        "grad_chosen": grad_chosen,
        "grad_rejected": grad_rejected,
        "accuracy": mean_of_pairs(loss.metrics["accuracy"]),
        "margin_mean": mean_of_pairs(loss.metrics["margin"]),
    }


def rm_pick_best(*, scores: Tensor, best: Tensor) -> Outputs:
    loss = preference_loss.best_of_n(scores.requires_grad_(), best)
    total = mean_of_pairs(loss.values)
    (grad,) = torch.autograd.grad(total, scores)
    return {"loss": total, "grad": grad, "accuracy": mean_of_pairs(loss.metrics["accuracy"])}


def rm_span_pairwise(
    *, chosen_ids: Tensor, rejected_ids: Tensor, chosen_values: Tensor, rejected_values: Tensor, pad: int
) -> Outputs:
    loss = preference_loss.span(chosen_values, rejected_values, chosen_ids, rejected_ids, pad)
    ends = {"chosen_end": loss.metrics["chosen"], "rejected_end": loss.metrics["rejected"]}
    return {"loss": mean_of_pairs(loss.values), **ends}


# ---- corrections


def rollout_weights(*, train: Tensor, rollout: Tensor, mask: Tensor, kind: str, **options: Any) -> Outputs:
    """``changed_fraction`` is that of the bounds, before the weights are normalised, and of tokens by themselves."""
    normalise = options.pop("batch_normalize", False)
    weigh = registry.ROLLOUT_WEIGHTS.function(kind.replace("seq", "sequence").replace("geo", "geometric"))
    bounded = weigh(train, rollout, mask, local, **options)
    weights = weigh(train, rollout, mask, local, **options, batch_normalise=normalise)
    found, plain = (metrics.correction_metrics(own, train, rollout, mask, reduce=local) for own in (weights, bounded))
    return {
        "weights": weights,
        "mean": found["rollout_corr/weight_mean"],
        "ess": found["rollout_corr/ess"],
        "changed_fraction": plain["rollout_corr/changed_fraction"] if kind.startswith("token") else None,
    }


def rejection_mask(
    *, train: Tensor, rollout: Tensor, mask: Tensor, options: list[str], thresholds: list[Any]
) -> Outputs:
    keep = mask
    for option, (lower, upper) in zip(options, thresholds, strict=True):
        statistic: Any = option.replace("seq_", "sequence_")
        keep = keep & rollout_correction.rejection(train, rollout, mask, statistic=statistic, upper=upper, lower=lower)
    rejected = (mask & ~keep).to(train.dtype)
    found = metrics.correction_metrics(rejected, train, rollout, mask, reduce=local)
    return {"mask": keep.to(train.dtype), "rejected_fraction": found["rollout_corr/kept_fraction"]}


def off_policy_sequence_mask(*, new: Tensor, behav: Tensor, adv: Tensor, mask: Tensor, delta: float) -> Outputs:
    advantages = adv[:, None].expand_as(new)
    keep = rollout_correction.off_policy_sequences(new, behav, advantages, mask, delta=delta)
    return {"keep": keep[:, 0].to(new.dtype), "kl": row_mean(k1(behav, new), mask)[:, 0]}


def m2po_mask(*, behav: Tensor, prox: Tensor, mask: Tensor, threshold: float) -> Outputs:
    return {"mask": rollout_correction.m2po(prox, behav, mask, local, threshold=threshold).to(prox.dtype)}


def proximal_logprobs(*, behav: Tensor, new: Tensor, versions: Tensor, current_version: int) -> Outputs:
    alpha = rollout_correction.proximal_weights(versions, current_version)
    logprobs = rollout_correction.proximal_logprobs(behav, new, alpha, method="loglinear")
    return {"alpha": alpha, "logprobs": logprobs}


def mismatch_metrics(*, train: Tensor, rollout: Tensor, mask: Tensor) -> Outputs:
    found = metrics.averaged(metrics.mismatch(train, rollout, mask), local)
    outputs: Outputs = {name.partition("/")[2]: value for name, value in found.items()}
    return {**outputs, "chi2_seq": outputs.pop("chi2_sequence"), "abs_diff": outputs.pop("logprob_gap")}
