"""Aggregation, losses, corrections, metrics, optimisers and selection: what an update and its data are made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megarl.algos.aggregation import sequence_mean, token_mean, weighted_sum
from megarl.algos.kl import k1
from megarl.algos.metrics import objective_metrics, value_metrics
from megarl.algos.policy import ppo
from megarl.algos.preference import pairwise
from megarl.algos.rewards import kl_penalties
from megarl.algos.terms import LossTerms, with_term
from megarl.algos.values import mse
from tests.algos.adapters.common import Args, Runner, UnsupportedError, done, local, take, take_mask

AGGREGATIONS = {"token-mean": token_mean, "seq-mean-token-mean": sequence_mean}


def require(args: Args, **supported: Any) -> None:
    """Refuses arguments, other than these constants, that ours does not take."""
    for name, value in supported.items():
        if args.pop(name, value) != value:
            raise UnsupportedError(name)


def aggregate_weights(args: Args, mask: Tensor, rows: Tensor) -> Tensor:
    mode = args["mode"]
    if mode not in AGGREGATIONS:
        raise UnsupportedError(mode)
    return AGGREGATIONS[mode](
        mask[rows],
        total_tokens=int(mask.sum()),
        total_sequences=int(mask.any(-1).sum()),
        dtype=torch.get_default_dtype(),
    )


def aggregate(args: Args) -> Args:
    (loss,), mask = take(args, "loss"), take_mask(args)
    return {"loss": weighted_sum(loss, aggregate_weights(args, mask, torch.arange(len(loss))))}


def aggregate_layout(args: Args) -> Args:
    (loss,), mask = take(args, "loss"), take_mask(args)
    parts = [torch.tensor(micro_batch) for rank in args["layout"] for micro_batch in rank]
    effective = sum(weighted_sum(loss[rows], aggregate_weights(args, mask, rows)) for rows in parts)
    everything = torch.arange(len(loss))
    return {"global": weighted_sum(loss, aggregate_weights(args, mask, everything)), "effective": effective}


def policy_loss(args: Args) -> Args:
    require(args, variant="ppo", eps_low=0.2, eps_high=None, norm_const=None, dual_clip=None, ratio_clamp=None)
    new, old, advantages = take(args, "new", "old", "adv")
    mask = take_mask(args)
    weights = aggregate_weights({"mode": args.pop("agg", "token-mean")}, mask, torch.arange(len(mask)))
    done(args)
    loss = ppo(new.requires_grad_(), old, advantages, mask)
    total = weighted_sum(loss.values, weights)
    (grad,) = torch.autograd.grad(total, new)
    ratio = loss.spreads["ratio"][mask]
    return {
        "loss": total,
        "grad": grad,
        "clipfrac": mean(loss, "clipfrac", mask),
        "ppo_kl": mean(loss, "ppo_kl", mask),
        "approxkl": mean(loss, "approxkl", mask),
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "ratio_min": ratio.min(),
    }


def value_loss(args: Args) -> Args:
    require(args, loss_type="mse", agg="token-mean", scale=0.5, norm_const=None)
    values, old_values, returns = take(args, "values", "old_values", "returns")
    mask, clip = take_mask(args), args.pop("clip", 0.2)
    done(args)
    loss = mse(values.requires_grad_(), old_values, returns, clip=clip)
    total = weighted_sum(loss.values, aggregate_weights({"mode": "token-mean"}, mask, torch.arange(len(mask))))
    (grad,) = torch.autograd.grad(total, values)
    return {
        "loss": total,
        "grad": grad,
        "clipfrac": mean(loss, "clipfrac", mask),
        "error": mean(loss, "error", mask),
        "vpred": mean(loss, "vpred", mask),
    }


def mean(loss: LossTerms, name: str, mask: Tensor) -> Tensor:
    return loss.metrics[name][mask].mean()


def run_objective_metrics(args: Args) -> Args:
    scores, old, ref = take(args, "scores", "logp", "ref")
    kl, mask = k1(old, ref), take_mask(args)
    penalties = kl_penalties(kl, mask, kl_coef=args["kl_coef"])
    metrics = objective_metrics(scores, old, kl, penalties, mask, reduce=local)
    return {
        **metrics,
        "objective/score_total": metrics["objective/rlhf_reward"],
        "kl_per_token_mean": metrics["objective/kl_per_token"],
    }


def run_explained_variance(args: Args) -> Args:
    returns, values = take(args, "returns", "values")
    metrics = value_metrics(returns, values, take_mask(args), reduce=local)
    return {"verl": metrics["value/explained_variance"]}


def rm_pairwise(args: Args) -> Args:
    require(args, kind="logsigmoid", margin=None)
    chosen, rejected = take(args, "chosen", "rejected")
    centering = args.pop("center", 0.0)
    done(args)
    loss = pairwise(chosen.requires_grad_(), rejected.requires_grad_(), centering=centering)
    grad_chosen, grad_rejected = torch.autograd.grad(loss.values.mean(), (chosen, rejected))
    return {
        "loss": loss.values.mean(),
        "grad_chosen": grad_chosen,
        "grad_rejected": grad_rejected,
        "accuracy": loss.metrics["accuracy"].mean(),
        "margin_mean": loss.metrics["margin"].mean(),
    }


def combine_actor_loss(args: Args) -> Args:
    pg, entropy, kl = take(args, "pg", "entropy", "kl")
    entropy_coef, kl_coef = args.pop("entropy_coef"), args.pop("kl_coef")
    done(args)
    loss = with_term(LossTerms(values=pg, metrics={}), "kl", kl, coef=kl_coef)
    return {"loss": with_term(loss, "entropy", entropy, coef=-entropy_coef).values}


RUNNERS: dict[str, Runner] = {
    "aggregate": aggregate,
    "aggregate_layout": aggregate_layout,
    "policy_loss": policy_loss,
    "value_loss": value_loss,
    "objective_metrics": run_objective_metrics,
    "explained_variance": run_explained_variance,
    "rm_pairwise": rm_pairwise,
    "combine_actor_loss": combine_actor_loss,
}
