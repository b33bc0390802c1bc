"""Losses and their aggregation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megarl.algos import aggregation, preference_loss, rollout_correction
from megarl.algos import policy_loss as policy_losses
from megarl.algos import value_loss as value_losses
from megarl.algos.aggregation import token_mean, weighted_sum
from megarl.algos.metrics import correction_metrics
from megarl.algos.optimization import ptx_shares
from megarl.algos.policy_loss import MAX_LOG_RATIO, LossTerms, weighted, with_term
from tests.algos.adapters.common import Args, Runner, UnsupportedError, done, floats, local, pick, take, take_mask

AGGREGATIONS = {
    "token-mean": aggregation.token_mean,
    "token-sum": aggregation.token_sum,
    "seq-mean-token-mean": aggregation.sequence_mean,
    "seq-mean-token-sum": aggregation.sequence_sum,
    "seq-mean-token-sum-norm": aggregation.sequence_sum_norm,
}
POLICY_LOSSES = {
    "ppo": policy_losses.ppo,
    "gspo": policy_losses.gspo,
    "cispo": policy_losses.cispo,
    "cispo_upper": policy_losses.cispo_upper,
    "sapo": policy_losses.sapo,
    "gmpo": policy_losses.gmpo,
    "reinforce": policy_losses.reinforce,
}
OPTIONS = {
    "ppo": {
        "eps_low": "clip",
        "eps_high": "clip_high",
        "dual_clip": "dual_clip",
        "delta": "delta",
        "ratio_clamp": "ratio_clamp",
    },
    "gspo": {"eps_low": "clip", "eps_high": "clip_high", "dual_clip": "dual_clip"},
    "cispo": {"eps_low": "clip", "eps_high": "clip_high"},
    "cispo_upper": {"eps_high": "max_ratio"},
    "sapo": {"tau_pos": "tau_pos", "tau_neg": "tau_neg"},
    "gmpo": {"eps_low": "clip", "eps_high": "clip_high"},
    "reinforce": {},
}
"""Which arguments each variant reads, and what ours calls them."""
DEFAULTS = {
    "eps_low": 0.2,
    "eps_high": None,
    "dual_clip": None,
    "delta": None,
    "ratio_clamp": None,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
}
"""The format's."""


# ---- aggregation


def step_weights(args: Args, mask: Tensor, rows: Tensor | None = None) -> Tensor:
    """The weights of some rows of the step with mask ``mask``, by ``mode`` (or ``agg``) and ``norm_const``."""
    mode, constant = args.pop("mode", None) or args.pop("agg", "token-mean"), args.pop("norm_const", None)
    options = {"tokens": constant or mask.shape[1]} if mode == "seq-mean-token-sum-norm" else {}
    return pick(AGGREGATIONS, mode)(mask if rows is None else mask[rows], **totals(mask), **options)


def totals(mask: Tensor) -> dict[str, Any]:
    return {
        "total_tokens": int(mask.sum()),
        "total_sequences": int(mask.any(-1).sum()),
        "dtype": torch.get_default_dtype(),
    }


def mean(loss: LossTerms, name: str, mask: Tensor) -> Tensor:
    """A metric of the step."""
    return weighted_sum({**loss.metrics, **loss.spreads}[name], token_mean(mask, **totals(mask)))


def aggregate(args: Args) -> Args:
    (loss,), mask = floats(args, "loss"), take_mask(args)
    weights = step_weights(args, mask)
    done(args)
    return {"loss": weighted_sum(loss, weights)}


def aggregate_layout(args: Args) -> Args:
    """Context parallelism (``cp``) is not supported: a response is on one rank."""
    (loss,), mask = floats(args, "loss"), take_mask(args)
    parts = [torch.tensor(rows, dtype=torch.int64) for rank in args["layout"] for rows in rank]
    effective = sum(weighted_sum(loss[rows], step_weights(dict(args), mask, rows)) for rows in parts)
    return {"global": weighted_sum(loss, step_weights(dict(args), mask)), "effective": effective}


# ---- losses


def policy_loss(args: Args) -> Args:
    new, old, advantages = floats(args, "new", "old", "adv")
    mask, variant = take_mask(args), args.pop("variant", "ppo")
    given = args.pop("weights", None)
    if variant == "gmpo":
        args["agg"] = "seq-mean-token-mean"
    weights = step_weights(args, mask)
    log_clamp = args.pop("log_clamp", None)
    asked = {name: args.pop(name, default) for name, default in DEFAULTS.items()}
    done(args)
    read = pick(OPTIONS, variant)
    unread = {name for name in ("dual_clip", "delta", "ratio_clamp") if name not in read and asked[name] is not None}
    if unread:
        raise UnsupportedError(f"{variant} with {unread}")
    options = {ours: asked[name] for name, ours in read.items()}
    function = POLICY_LOSSES[variant]
    loss = function(new.requires_grad_(), old, advantages, mask, **options, log_clamp=log_clamp or MAX_LOG_RATIO)
    if given is not None:
        loss = weighted(loss, torch.tensor(given))
    total = weighted_sum(loss.values, weights)
    (grad,) = torch.autograd.grad(total, new)
    outputs = {"loss": total, "grad": grad, **policy_metrics(loss, mask)}
    if "sequence_ratio" in loss.metrics:
        outputs["ratio_seq"] = loss.metrics["sequence_ratio"][:, 0]
    return outputs


def policy_metrics(loss: LossTerms, mask: Tensor) -> Args:
    ratio = loss.spreads["ratio"][mask]
    return {
        **{name: mean(loss, name, mask) for name in ("clipfrac", "clipfrac_lower", "ppo_kl", "approxkl")},
        "ratio_mean": mean(loss, "ratio", mask),
        "ratio_max": ratio.max(),
        "ratio_min": ratio.min(),
    }


def decoupled_policy_loss(args: Args) -> Args:
    """PPO around the proximal policy, with weights of the rollout correction."""
    new, prox, behav, advantages = floats(args, "new", "prox", "behav", "adv")
    mask, cap, mode = take_mask(args), args.pop("cap", None), args.pop("cap_mode", "mask")
    options = {"clip": args.pop("eps_low", 0.2), "clip_high": args.pop("eps_high", None)}
    options["dual_clip"] = args.pop("dual_clip", None)
    done(args)
    rule = pick({"mask": "mask", "clamp": "truncate"}, mode)
    upper = float("inf") if cap is None else cap
    weights = rollout_correction.rollout_weights(prox, behav, mask, local, level="token", rule=rule, upper=upper)
    loss = weighted(policy_losses.ppo(new.requires_grad_(), prox, advantages, mask, **options), weights)
    total = weighted_sum(loss.values, token_mean(mask, **totals(mask)))
    (grad,) = torch.autograd.grad(total, new)
    corrected = correction_metrics(weights, prox, behav, mask, reduce=local)
    return {
        "loss": total,
        "grad": grad,
        **policy_metrics(loss, mask),
        "behave_weight_mean": corrected["rollout_corr/kept_weight_mean"],
        "behave_kl_mean": corrected["rollout_corr/kept_log_ratio"],
        "kept_fraction": corrected["rollout_corr/kept_fraction"],
    }


def value_loss(args: Args) -> Args:
    now, old, returns = floats(args, "values", "old_values", "returns")
    mask = take_mask(args)
    weights, delta = step_weights(args, mask), args.pop("huber_delta", 10.0)
    kind, options = args.pop("loss_type", "mse"), {"clip": args.pop("clip", 0.2), "scale": args.pop("scale", 0.5)}
    done(args)
    function = pick({"mse": value_losses.mse, "huber": value_losses.huber}, kind)
    if kind == "huber":
        options["delta"] = delta
    loss = function(now.requires_grad_(), old, returns, **options)
    total = weighted_sum(loss.values, weights)
    (grad,) = torch.autograd.grad(total, now)
    return {"loss": total, "grad": grad, **{name: mean(loss, name, mask) for name in ("clipfrac", "error", "vpred")}}


def combine_actor_loss(args: Args) -> Args:
    loss = LossTerms(values=floats(args, "pg")[0], metrics={})
    for name, coef_name in (("entropy", "entropy_coef"), ("kl", "kl_coef"), ("vf", "vf_coef"), ("aux", "aux_coef")):
        value, coef = torch.tensor(args.pop(name, 0.0)), args.pop(coef_name, 0.0)
        loss = with_term(loss, name, value, coef=-coef if name == "entropy" else coef)
    done(args)
    return {"loss": loss.values}


def ptx_mix(args: Args) -> Args:
    terms = torch.stack(floats(args, "pg", "ptx"))
    shares = ptx_shares(coef=args.pop("coef"), mode=args.pop("mode", "add"))
    done(args)
    return {"loss": weighted_sum(terms, torch.tensor(shares))}


# ---- the reward model


def mean_of_pairs(values: Tensor) -> Tensor:
    """A pair is a sequence of one token."""
    mask = torch.ones_like(values).bool()
    return weighted_sum(values, token_mean(mask, **totals(mask[:, None])))


def rm_pairwise(args: Args) -> Args:
    chosen, rejected = (x.requires_grad_() for x in floats(args, "chosen", "rejected"))
    margin = args.pop("margin", None)
    options = {"kind": args.pop("kind", "logsigmoid"), "centering": args.pop("center", 0.0)}
    done(args)
    if margin is not None:
        options |= {"margins": torch.tensor(margin), "margin": True}
    loss = preference_loss.pairwise(chosen, rejected, **options)
    total = mean_of_pairs(loss.values)
    grad_chosen, grad_rejected = torch.autograd.grad(total, (chosen, rejected))
    return {
        "loss": total,
        "grad_chosen": grad_chosen,
        "grad_rejected": grad_rejected,
        "accuracy": mean_of_pairs(loss.metrics["accuracy"]),
        "margin_mean": mean_of_pairs(loss.metrics["margin"]),
    }


def rm_pick_best(args: Args) -> Args:
    (scores,), (best,) = floats(args, "scores"), take(args, "best")
    done(args)
    loss = preference_loss.best_of_n(scores.requires_grad_(), best)
    total = mean_of_pairs(loss.values)
    (grad,) = torch.autograd.grad(total, scores)
    return {"loss": total, "grad": grad, "accuracy": mean_of_pairs(loss.metrics["accuracy"])}


def rm_span_pairwise(args: Args) -> Args:
    spans = preference_loss.spans_of(*take(args, "chosen_ids", "rejected_ids"), pad=args.pop("pad"))
    loss = preference_loss.span(*floats(args, "chosen_values", "rejected_values"), spans)
    done(args)
    return {
        "loss": mean_of_pairs(loss.values),
        "chosen_end": loss.metrics["chosen"],
        "rejected_end": loss.metrics["rejected"],
    }


RUNNERS: dict[str, Runner] = {
    "aggregate": aggregate,
    "aggregate_layout": aggregate_layout,
    "policy_loss": policy_loss,
    "decoupled_policy_loss": decoupled_policy_loss,
    "value_loss": value_loss,
    "combine_actor_loss": combine_actor_loss,
    "ptx_mix": ptx_mix,
    "rm_pairwise": rm_pairwise,
    "rm_pick_best": rm_pick_best,
    "rm_span_pairwise": rm_span_pairwise,
}
