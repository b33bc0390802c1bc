"""Runs the cases of vectors.json with the functions of megarl.algos.

vectors.json is language-neutral: numbers from an independent numpy implementation, compared with the published systems
that it names. A case is {id, fn, args, expected}; ``run`` returns what ours computes of ``expected`` by the same names.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from megarl.algos.advantages import gae, grpo, per_token
from megarl.algos.aggregation import sequence_mean, token_mean, weighted_sum
from megarl.algos.controllers import kl_controller
from megarl.algos.kl import k1, k2, k3
from megarl.algos.metrics import objective_metrics, value_metrics
from megarl.algos.normalisation import masked_moments, whiten
from megarl.algos.policy import ppo
from megarl.algos.preference import pairwise
from megarl.algos.rewards import (
    clip_scores,
    kl_penalties,
    normalise_scores,
    replace_missing_end,
    score_scale,
    token_rewards,
)
from megarl.algos.terms import LossTerms, with_term
from megarl.algos.values import mse

Args = dict[str, Any]
AGGREGATIONS = {"token-mean": token_mean, "seq-mean-token-mean": sequence_mean}


class UnsupportedError(Exception):
    """The case asks for something that megarl.algos does not have."""


def run(case: Args, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """What ours computes of a case, as lists and floats.

    Raises:
        UnsupportedError: there is no such function, or not with these arguments.
    """
    if case["fn"] not in RUNNERS:
        raise UnsupportedError(case["fn"])
    torch.set_default_dtype(dtype)
    try:
        outputs = RUNNERS[case["fn"]](dict(case["args"]))
    finally:
        torch.set_default_dtype(torch.float32)
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in outputs.items()}


def local(vector: Tensor) -> Tensor:
    """The reduction of one rank."""
    return vector


def require(args: Args, **supported: Any) -> None:
    """Refuses arguments, other than these constants, that ours does not take."""
    for name, value in supported.items():
        if args.pop(name, value) != value:
            raise UnsupportedError(name)


def take(args: Args, *names: str) -> list[Tensor]:
    return [torch.tensor(args.pop(name)) for name in names]


def take_mask(args: Args) -> Tensor:
    return torch.tensor(args.pop("mask")).bool()


def done(args: Args) -> None:
    if args:
        raise UnsupportedError(", ".join(args))


def kl_estimate(args: Args) -> Args:
    estimators = {"k1": k1, "k2": k2, "k3": k3}
    kind = args.pop("kind")
    if kind not in estimators:
        raise UnsupportedError(kind)
    if kind == "k3":  # the input clamp changes neither value nor gradient where the output clamp acts as well
        require(args, in_clamp=20.0, out_clamp=10.0)
    logp, ref = take(args, "logp", "ref")
    done(args)
    kl = estimators[kind](logp.requires_grad_(), ref)
    (grad,) = torch.autograd.grad(kl.sum(), logp)
    return {"kl": kl, "grad": grad}


def score_without_token(args: Args) -> Args:
    require(args, mode="replace")
    scores, has_token = take(args, "scores", "has_token")
    return {"scores": replace_missing_end(scores, has_token.bool(), args["value"])}


def shape_rewards(args: Args) -> Args:
    require(args, placement="last_valid")
    scores, kl = take(args, "scores", "kl")
    mask, coef, clip = take_mask(args), args.pop("coef"), args.pop("clip", None)
    done(args)
    if clip is not None:
        assert clip[0] == -clip[1]
        scores = clip_scores(scores, clip[1])
    penalties = kl_penalties(kl, mask, kl_coef=coef)
    return {"rewards": token_rewards(scores, penalties, mask), "non_score": penalties}


def run_whiten(args: Args) -> Args:
    require(args, shift_mean=True, ddof=0, form="var_plus_eps", eps=1e-8)
    (x,) = take(args, "x")
    mask = take_mask(args) if "mask" in args else torch.ones_like(x).bool()
    moments = masked_moments(x, mask, local)
    return {"whitened": whiten(x, mask, local), "mean": moments.mean, "var": moments.variance}


def whiten_sharded(args: Args) -> Args:
    require(args, shift_mean=True, ddof=0, eps=1e-8)
    shards = [(torch.tensor(x), torch.tensor(m).bool()) for x, m in zip(args["shards"], args["masks"], strict=True)]
    moments = on_ranks(masked_moments, shards)[0]
    whitened = [w.tolist() for w in on_ranks(whiten, shards)]
    return {"whitened": whitened, "mean": moments.mean, "var": moments.variance}


def on_ranks(function: Callable[..., Any], per_rank: list[tuple[Any, ...]]) -> list[Any]:
    """Results of ``function(*arguments, reduce)`` on ranks that are threads; leaving out a reduction breaks it."""
    vectors: list[Tensor | None] = [None] * len(per_rank)
    meet = threading.Barrier(len(per_rank), timeout=10)

    def rank(index: int) -> Any:
        def reduce(vector: Tensor) -> Tensor:
            vectors[index] = vector
            meet.wait()
            total = torch.stack([v for v in vectors if v is not None]).sum(0)
            meet.wait()
            return total

        try:
            return function(*per_rank[index], reduce)
        except Exception:
            meet.abort()
            raise

    with ThreadPoolExecutor(len(per_rank)) as pool:
        return list(pool.map(rank, range(len(per_rank))))


def run_gae(args: Args) -> Args:
    bounded = args.pop("mode", "carry")
    if bounded == "plain":
        args["mask"] = torch.ones_like(torch.tensor(args["rewards"])).tolist()
    elif bounded != "carry":
        raise UnsupportedError(bounded)
    rewards, values = take(args, "rewards", "values")
    mask, gamma, lam = take_mask(args), args.pop("gamma", 1.0), args.pop("lam", 0.95)
    done(args)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    return {"advantages": advantages, "returns": returns}


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


def run_controller(args: Args) -> Args:
    fixed = args["kind"] == "fixed"
    controller = kl_controller(args["init"], target=None if fixed else args["target"], horizon=args["horizon"])
    values = []
    for kl, samples in args["updates"]:
        controller.update(kl, samples)
        values.append(controller.coef)
    return {"values": values}


def outcome_advantages(args: Args) -> Args:
    require(args, kind="grpo", eps=1e-6, ddof=1)
    (scores,) = take(args, "rewards")
    names, singleton = args.pop("groups"), args.pop("singleton", "raw")
    done(args)
    groups = torch.tensor([sorted(set(names)).index(name) for name in names])
    if singleton != "zero" and (groups.unique(return_counts=True)[1] == 1).any():
        raise UnsupportedError("groups of one that keep their score")
    return {"advantages": grpo(scores, groups)}


def broadcast_advantages(args: Args) -> Args:
    (advantages,) = take(args, "seq_adv")
    return {"advantages": per_token(advantages, take_mask(args))}


def reward_norm(args: Args) -> Args:
    require(args, ddof=0, target_mean=0.0, target_std=1.0)
    (samples,) = take(args, "samples")
    done(args)
    mean, deviation = score_scale(samples)
    normalised = normalise_scores(samples, mean=mean, deviation=deviation)
    return {"mean": mean, "std": deviation, "gain": 1 / deviation, "bias": -mean / deviation, "normalized": normalised}


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


RUNNERS: dict[str, Callable[[Args], Args]] = {
    "kl_estimate": kl_estimate,
    "score_without_token": score_without_token,
    "shape_rewards": shape_rewards,
    "whiten": run_whiten,
    "whiten_sharded": whiten_sharded,
    "gae": run_gae,
    "gae_valid": run_gae,
    "aggregate": aggregate,
    "aggregate_layout": aggregate_layout,
    "policy_loss": policy_loss,
    "value_loss": value_loss,
    "objective_metrics": run_objective_metrics,
    "explained_variance": run_explained_variance,
    "kl_controller": run_controller,
    "outcome_advantages": outcome_advantages,
    "broadcast_advantages": broadcast_advantages,
    "reward_norm": reward_norm,
    "rm_pairwise": rm_pairwise,
    "combine_actor_loss": combine_actor_loss,
}
