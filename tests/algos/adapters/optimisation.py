"""Rollout corrections, optimizers, selection and metrics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megarl.algos import metrics, registry, rollout_correction, selection
from megarl.algos.kl import k1
from megarl.algos.optimization import divided, ema, exceeds_target, linear_anneal, tensorflow_eps
from megarl.algos.policy_loss import MAX_LOG_RATIO, row_mean
from megarl.algos.reward_shaping import kl_penalties
from megarl.algos.rollout_correction import m2po
from megarl.algos.value_loss import ValueMoments, mse
from tests.algos.adapters.common import Args, Runner, done, floats, local, pick, take, take_mask
from tests.algos.adapters.padding import rank_seeds
from tests.algos.adapters.updates import mean

WEIGHTS = {
    f"{short}_{rule}": registry.ROLLOUT_WEIGHTS.function(f"{level}_{rule}")
    for short, level in (("token", "token"), ("seq", "sequence"), ("geo", "geometric"))
    for rule in ("truncate", "mask")
}


# ---- corrections


def rollout_weights(args: Args) -> Args:
    """``changed_fraction`` is that of the bounds, before the weights are normalised, and of tokens by themselves."""
    (train, rollout), mask, kind = floats(args, "train", "rollout"), take_mask(args), args.pop("kind")
    options = {
        "upper": args.pop("upper", 2.0),
        "lower": args.pop("lower", None),
        "log_clamp": args.pop("safety", MAX_LOG_RATIO),
    }
    weigh, normalise = pick(WEIGHTS, kind), args.pop("batch_normalize", False)
    done(args)
    weights = weigh(train, rollout, mask, local, **options, batch_normalise=normalise)
    told, bounded = (
        metrics.correction_metrics(own, train, rollout, mask, reduce=local)
        for own in (weights, weigh(train, rollout, mask, local, **options))
    )
    return {
        "weights": weights,
        "mean": told["rollout_corr/weight_mean"],
        "ess": told["rollout_corr/ess"],
        "changed_fraction": bounded["rollout_corr/changed_fraction"] if kind.startswith("token") else None,
    }


def rejection_mask(args: Args) -> Args:
    (train, rollout), mask = floats(args, "train", "rollout"), take_mask(args)
    keep, log_clamp = mask, args.pop("safety", MAX_LOG_RATIO)
    for option, (lower, upper) in zip(args.pop("options"), args.pop("thresholds"), strict=True):
        statistic: Any = option.replace("seq_", "sequence_")
        keep = keep & rollout_correction.rejection(
            train, rollout, mask, statistic=statistic, upper=upper, lower=lower, log_clamp=log_clamp
        )
    done(args)
    rejected = (mask & ~keep).to(train.dtype)
    told = metrics.correction_metrics(rejected, train, rollout, mask, reduce=local)
    return {"mask": keep.to(train.dtype), "rejected_fraction": told["rollout_corr/kept_fraction"]}


def off_policy_sequence_mask(args: Args) -> Args:
    (new, behav, advantages), mask = floats(args, "new", "behav", "adv"), take_mask(args)
    keep = rollout_correction.off_policy_sequences(
        new, behav, advantages[:, None].expand_as(new), mask, delta=args.pop("delta")
    )
    done(args)
    return {"keep": keep[:, 0].to(new.dtype), "kl": row_mean(k1(behav, new), mask)[:, 0]}


def m2po_mask(args: Args) -> Args:
    (behav, prox), mask = floats(args, "behav", "prox"), take_mask(args)
    return {"mask": m2po(prox, behav, mask, local, threshold=args["threshold"]).to(prox.dtype)}


def proximal_logprobs(args: Args) -> Args:
    (behav, new), (versions,) = floats(args, "behav", "new"), take(args, "versions")
    alpha = rollout_correction.proximal_weights(versions, args.pop("current_version"))
    method: Any = args.pop("method", "loglinear")
    done(args)
    return {"alpha": alpha, "logprobs": rollout_correction.proximal_logprobs(behav, new, alpha, method=method)}


def mismatch_metrics(args: Args) -> Args:
    (train, rollout), mask = floats(args, "train", "rollout"), take_mask(args)
    told = metrics.averaged(metrics.mismatch(train, rollout, mask), local)
    outputs: Args = {name.partition("/")[2]: value for name, value in told.items()}
    return {**outputs, "chi2_seq": outputs.pop("chi2_sequence"), "abs_diff": outputs.pop("logprob_gap")}


# ---- optimisation


def adam(args: Args) -> Args:
    """torch's AdamW, whose epsilon follows the schedule as in training."""
    (parameter,) = floats(args, "params")
    beta2, eps, style = args.pop("beta2", 0.999), args.pop("eps", 1e-5), args.pop("style", "tensorflow")
    optimizer = torch.optim.AdamW(
        [parameter], lr=args.pop("lr"), betas=(args.pop("beta1", 0.9), beta2), eps=eps, weight_decay=0.0
    )
    schedules = {"tensorflow": lambda step: tensorflow_eps(eps, beta2, step), "pytorch": lambda _: eps}
    course: list[Any] = []
    for step, gradient in enumerate(args.pop("grads"), start=1):
        parameter.grad = torch.tensor(gradient)
        optimizer.param_groups[0]["eps"] = pick(schedules, style)(step)
        optimizer.step()
        course.append(parameter.tolist())
    done(args)
    return {"params": course}


def run_ema(args: Args) -> Args:
    (average,), decay = floats(args, "ema0"), args.pop("beta", 0.992)
    course: list[Any] = []
    for parameters in args["params"]:
        average = ema(average, torch.tensor(parameters), decay=decay)
        course.append(average.tolist())
    return {"ema": course}


def run_linear_anneal(args: Args) -> Args:
    index = args["index"]
    if isinstance(index, list):
        return {"lr": [linear_anneal(args["lr"], i, args["total"]) for i in index]}
    return {"lr": linear_anneal(args["lr"], index, args["total"])}


def run_rank_seeds(args: Args) -> Args:
    ranks, options = args.pop("ranks"), {name: args.pop(name) for name in ("stride",) if name in args}
    return {"seeds": rank_seeds(args["seed"], range(ranks) if isinstance(ranks, int) else ranks, **options)}


def minibatch_plan(args: Args) -> Args:
    def plan(permutation: list[int]) -> list[Any]:
        mini_batches = divided(permutation, args["num_minibatches"])
        return [[list(part) for part in divided(members, args["accumulation"])] for members in mini_batches]

    return {"plan": [plan(permutation) for permutation in args["permutations"]]}


def early_stop(args: Args) -> Args:
    options = {"target": args["target_kl"], "factor": args.get("factor", 1.5)}
    for epoch, kl in enumerate(args["policy_kls"], start=1):
        if exceeds_target(kl, **options):
            return {"epochs_run": epoch, "stopped": True}
    return {"epochs_run": len(args["policy_kls"]), "stopped": False}


def value_rms(args: Args) -> Args:
    moments, beta = ValueMoments(), args.pop("beta", 0.99995)
    for batch, mask in zip(args.pop("batches"), args.pop("masks"), strict=True):
        moments = moments.update(torch.tensor(batch), torch.tensor(mask).bool(), local, beta=beta)
    eps = args.pop("eps", 1e-5)
    mean, std = moments.mean_and_std(eps=eps)
    outputs: Args = {"mean": mean, "std": std}
    if (probe := args.pop("probe", None)) is not None:
        values = torch.tensor(probe)
        outputs["normalized"] = moments.normalise(values, eps=eps)
        outputs["denormalized"] = moments.denormalise(values, eps=eps)
    done(args)
    return outputs


# ---- selection


def raft_select(args: Args) -> Args:
    (scores,), strategy = floats(args, "rewards"), args.pop("strategy")
    k, fraction, discard = args.pop("k", None), args.pop("fraction", None), args.pop("discard", None)
    done(args)
    discarded = torch.zeros_like(scores).bool() if discard is None else torch.tensor(discard).bool()
    groups = torch.arange(len(scores)).repeat_interleave(k or 1)[: len(scores)]
    options = {} if fraction is None else {"fraction": fraction}
    select = pick({"local": selection.best_of_groups, "top": selection.best_fraction}, strategy)
    return {"indices": select(scores, groups, discarded, **options)}


def dynamic_filter(args: Args) -> Args:
    rule = args.get("rule", "nonzero_std")
    function = pick({"nonzero_std": selection.nonzero_std, "open_range": selection.open_range}, rule)
    names = {"nonzero_std": ("tol",), "open_range": ("low", "high")}[rule]
    options = {name: args[name] for name in names if name in args}
    default = torch.get_default_dtype()
    return {"keep": [function(torch.tensor(own, dtype=default), **options) for own in args["group_rewards"]]}


# ---- metrics


def run_objective_metrics(args: Args) -> Args:
    scores, old, ref = floats(args, "scores", "logp", "ref")
    kl, mask = k1(old, ref), take_mask(args)
    penalties = kl_penalties(kl, mask, kl_coef=args["kl_coef"])
    drift = metrics.averaged(metrics.policy_drift(old, kl, mask), local)
    told = {**drift, **metrics.objective_metrics(scores, penalties, mask, reduce=local)}
    return {
        **told,
        "objective/score_total": told["objective/rlhf_reward"],
        "kl_per_token_mean": told["objective/kl_per_token"],
        "kl_seq_mean_mean": told["objective/kl_token_mean"],
    }


def run_explained_variance(args: Args) -> Args:
    returns, old, new = floats(args, "returns", "values", "vpred")
    mask = take_mask(args)
    told = metrics.value_metrics(returns, old, mask, reduce=local)
    error: Tensor = mean(mse(new, old, returns), "error", mask)
    return {
        "verl": told["value/explained_variance"],
        "openai": metrics.explained_variance(float(error), told["returns/var"]),
    }


RUNNERS: dict[str, Runner] = {
    "rollout_weights": rollout_weights,
    "rejection_mask": rejection_mask,
    "off_policy_sequence_mask": off_policy_sequence_mask,
    "m2po_mask": m2po_mask,
    "proximal_logprobs": proximal_logprobs,
    "mismatch_metrics": mismatch_metrics,
    "adam": adam,
    "ema": run_ema,
    "linear_anneal": run_linear_anneal,
    "rank_seeds": run_rank_seeds,
    "minibatch_plan": minibatch_plan,
    "early_stop": early_stop,
    "value_rms": value_rms,
    "raft_select": raft_select,
    "dynamic_filter": dynamic_filter,
    "objective_metrics": run_objective_metrics,
    "explained_variance": run_explained_variance,
}
