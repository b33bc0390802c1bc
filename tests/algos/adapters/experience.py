"""Normalisation, token advantages and group advantages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megarl.algos import group_advantages
from megarl.algos.advantages import broadcast_advantages, discounted_returns, gae, reinforce, scan, vapo
from megarl.algos.group_advantages import Samples
from megarl.algos.normalization import (
    Groups,
    Reduce,
    grouped_tokens,
    levels,
    masked_moments,
    on_mask,
    standardise,
    whiten_advantages,
)
from megarl.algos.reward_shaping import kl_penalties
from megarl.experience.padded_batch import align, flatten, response_mask
from tests.algos.adapters.common import Args, Runner, done, floats, local, numbered, on_ranks, pick, take_mask

COMPARISONS = {
    "grpo": (group_advantages.grpo, ("eps", "ddof", "singleton")),
    "dr_grpo": (group_advantages.dr_grpo, ("singleton",)),
    "rloo": (group_advantages.rloo, ("singleton",)),
    "loo_std": (group_advantages.rloo_std, ("eps",)),
    "opo": (group_advantages.opo, ("singleton",)),
    "passk": (group_advantages.pass_at_k, ("eps",)),
    "batch_std": (group_advantages.batch_std, ("eps", "ddof")),
    "masked_loo": (group_advantages.masked_rloo, ()),
}
"""Each with the options it has."""


def pick_options(args: Args, *names: str) -> Args:
    """The options in the case."""
    return {name: args.pop(name) for name in names if name in args}


def consecutive(rows: int, size: int) -> Groups:
    """Groups of neighbouring rows."""
    count = rows // size
    return Groups(index=torch.arange(count).repeat_interleave(size), count=count)


def samples_of(scores: Tensor, groups: list[Any], **known: Any) -> Samples:
    """Samples with the given fields; the others are defaults."""
    usual = {
        "lengths": torch.ones(len(scores), dtype=torch.int64),
        "finished": torch.ones(len(scores)).bool(),
        "scored": torch.ones(len(scores)).bool(),
    }
    return Samples(scores=scores, groups=numbered(groups), **{**usual, **known})


# ---- normalisation


def run_whiten(args: Args) -> Args:
    (x,) = floats(args, "x")
    mask = take_mask(args) if args.get("mask") is not None else torch.ones_like(x).bool()
    args.pop("mask", None)
    keep_mean, ddof = not args.pop("shift_mean", True), args.pop("ddof", 0)
    options = whitening_options(args)
    done(args)
    moments = masked_moments(x, mask, local)
    whitened = standardise(x, mask, local, keep_mean=keep_mean, ddof=ddof, **options)
    return {"whitened": whitened, "mean": moments.mean, "var": moments.variance_of(ddof)}


def whiten_sharded(args: Args) -> Args:
    shards = [
        (torch.tensor(x, dtype=torch.get_default_dtype()), torch.tensor(m).bool())
        for x, m in zip(args.pop("shards"), args.pop("masks"), strict=True)
    ]
    keep_mean, ddof = not args.pop("shift_mean", True), args.pop("ddof", 0)
    options = whitening_options(args)
    done(args)

    def whiten(x: Tensor, mask: Tensor, reduce: Reduce) -> Tensor:
        return on_mask(standardise(x, mask, reduce, keep_mean=keep_mean, ddof=ddof, **options), mask)

    moments = on_ranks(masked_moments, shards)[0]
    whitened = [shard.tolist() for shard in on_ranks(whiten, shards)]
    return {"whitened": whitened, "mean": moments.mean, "var": moments.variance_of(ddof)}


def whitening_options(args: Args) -> Args:
    """Any other form is the one that the specification has without a divisor."""
    options = pick_options(args, "eps", "form")
    divides = options.get("form", "var_plus_eps") in ("var_plus_eps", "var_clamp", "std_plus_eps")
    return options if divides else {"mean_only": True}


def run_grouped_tokens(args: Args) -> Args:
    (advantages,), mask = floats(args, "adv"), take_mask(args)
    groups, options = consecutive(len(advantages), args.pop("group_size")), pick_options(args, "ddof", "eps")
    done(args)
    return {"advantages": grouped_tokens(advantages, mask, groups, local, **options)}


def level_norm(args: Args) -> Args:
    (x,), given = floats(args, "x"), args.pop("mask", None)
    mask = torch.ones_like(x).bool() if given is None else torch.tensor(given).bool()
    groups = consecutive(len(x), args.pop("group_size", 1))
    options = pick_options(args, "leave_one_out", "unbiased", "eps")
    asked = {"mean": args.pop("mean_level", None), "std": args.pop("std_level", None)}
    level = {name: None if chosen == "none" else chosen for name, chosen in asked.items()}
    done(args)
    rows = (len(x), -1)
    normalised = levels(x.reshape(rows), mask.reshape(rows), groups, local, **level, **options)
    return {"out": normalised.reshape(x.shape)}


# ---- advantages of tokens


def run_scan(args: Args) -> Args:
    rewards, values = floats(args, "rewards", "values")
    given, mode = args.pop("mask", None), args.pop("mode", "carry")
    mask = torch.ones_like(rewards).bool() if given is None or mode == "plain" else torch.tensor(given).bool()
    if pick({"plain": False, "carry": False, "zero": True}, mode):
        rewards, values, mask = gaps_as_zeros(mask, rewards, values)
    start = args.pop("bootstrap", None)
    bootstrap = None if start is None else torch.tensor(start, dtype=rewards.dtype)
    gamma, lam = args.pop("gamma", 1.0), args.pop("lam", 0.95)
    done(args)
    advantages, returns = scan(rewards, values, mask, bootstrap, gamma=gamma, lam=lam)
    return {"advantages": advantages, "returns": returns}


def gaps_as_zeros(mask: Tensor, *columns: Tensor) -> list[Tensor]:
    """The columns and mask of OpenRLHF and NeMo-Aligner, where a gap consists of tokens without reward and value."""
    return [*(on_mask(column, mask) for column in columns), torch.ones_like(mask)]


def run_gae(args: Args) -> Args:
    (rewards, values), mask = floats(args, "rewards", "values"), take_mask(args)
    start, options = args.pop("bootstrap", None), pick_options(args, "gamma", "lam")
    done(args)
    bootstrap = None if start is None else torch.tensor(start, dtype=rewards.dtype)
    advantages, returns = gae(rewards, values, mask, bootstrap, **options)
    return {"advantages": advantages, "returns": returns}


def gae_packed(args: Args) -> Args:
    """Rows from packed sequences: of the L + 1 values of one, the last is that of the state after it."""
    rewards, values = floats(args, "rewards", "values")
    lengths = torch.tensor(args.pop("cu_short")).diff().tolist()
    cut_off, options = take_mask(args, "truncated"), pick_options(args, "gamma", "lam")
    done(args)
    of_rows = values.split([length + 1 for length in lengths])
    mask = response_mask(lengths)
    bootstrap = torch.stack([row[-1] for row in of_rows]).masked_fill(~cut_off, 0.0)
    states = align(torch.cat([row[:-1] for row in of_rows]), mask)
    advantages, returns = gae(align(rewards, mask), states, mask, bootstrap, **options)
    return {"advantages": flatten(advantages, mask), "returns": flatten(returns, mask)}


def gae_decoupled(args: Args) -> Args:
    (rewards, values), mask = floats(args, "rewards", "values"), take_mask(args)
    options = {"length_alpha": 0.0, **pick_options(args, "gamma", "lam_value", "lam_policy", "length_alpha")}
    done(args)
    advantages, returns = vapo(rewards, values, mask, **options)
    return {"advantages": advantages, "returns": returns}


def run_discounted_returns(args: Args) -> Args:
    (rewards,), mask = floats(args, "rewards"), take_mask(args)
    if pick({"carry": False, "zero": True}, args.pop("mode", "carry")):
        rewards, mask = gaps_as_zeros(mask, rewards)
    gamma = args.pop("gamma", 1.0)
    done(args)
    return {"returns": discounted_returns(rewards, mask, gamma=gamma)}


def reinforce_pp(args: Args) -> Args:
    (rewards,), mask = floats(args, "rewards"), take_mask(args)
    returns, _ = reinforce(rewards, None, mask, gamma=args.pop("gamma", 1.0))
    advantages = whitened(returns, mask, {"ddof": 1, **pick_options(args, "ddof", "eps", "form")})
    done(args)
    return {"advantages": advantages, "returns": returns}


def whitened(advantages: Tensor, mask: Tensor, options: Args) -> Tensor:
    options |= whitening_options({"form": options.pop("form")}) if "form" in options else {}
    return whiten_advantages(advantages, mask, consecutive(len(mask), 1), local, **options)


# ---- group advantages


def outcome_advantages(args: Args) -> Args:
    (scores,), kind = floats(args, "rewards"), args.pop("kind")
    groups, lengths, valid = (args.pop(name, None) for name in ("groups", "lengths", "valid"))
    compare, names = pick(COMPARISONS, kind)
    given = pick_options({"singleton": "raw", **args}, *names)
    known = {} if lengths is None else {"lengths": torch.tensor(lengths)}
    if valid is not None:
        known["finished"] = torch.tensor(valid).bool()
    return {"advantages": compare(samples_of(scores, groups, **known), **given)}


def run_broadcast(args: Args) -> Args:
    (outcomes,), mask = floats(args, "seq_adv"), take_mask(args)
    return {"advantages": broadcast_advantages(outcomes, torch.zeros(mask.shape), mask)}


def reinforce_pp_baseline(args: Args) -> Args:
    (scores, kl), mask = floats(args, "scores", "kl"), take_mask(args)
    outcomes = group_advantages.dr_grpo(samples_of(scores, args.pop("groups")))
    mode, coef = args.pop("kl_mode", "cumulative"), args.pop("coef")
    penalties = kl_penalties(kl, mask, kl_coef=0.0 if mode == "none" else coef)
    raw = broadcast_advantages(outcomes, penalties, mask, cumulative=mode == "cumulative")
    advantages = whitened(raw, mask, {"form": "var_clamp", **pick_options(args, "ddof", "eps", "form")})
    done(args)
    return {"advantages": advantages, "raw": raw}


def remax(args: Args) -> Args:
    """The case has token rewards only: they replace the penalties, and the scores are 0."""
    (rewards, greedy), mask = floats(args, "rewards", "baseline_scores"), take_mask(args)
    done(args)
    alone = samples_of(torch.zeros_like(greedy), list(range(len(greedy))), greedy_scores=greedy)
    returns, _ = reinforce(rewards, None, mask)
    return {"advantages": broadcast_advantages(group_advantages.remax(alone), rewards, mask), "returns": returns}


def gdpo(args: Args) -> Args:
    (components,), mask = floats(args, "components"), take_mask(args)
    weights = args.pop("weights", None) or [1.0] * len(components)
    samples = samples_of(components[0], args.pop("groups"), components=components.T, weights=weights)
    outcomes = group_advantages.gdpo(samples, **pick_options(args, "eps"))
    done(args)
    tokens = broadcast_advantages(outcomes, torch.zeros(mask.shape), mask)
    return {"sequence": outcomes, "advantages": whitened(tokens, mask, {"ddof": 1})}


RUNNERS: dict[str, Runner] = {
    "whiten": run_whiten,
    "whiten_sharded": whiten_sharded,
    "grouped_token_norm": run_grouped_tokens,
    "level_norm": level_norm,
    "gae": run_scan,
    "gae_valid": run_gae,
    "gae_packed": gae_packed,
    "gae_decoupled": gae_decoupled,
    "discounted_returns": run_discounted_returns,
    "outcome_advantages": outcome_advantages,
    "broadcast_advantages": run_broadcast,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "remax": remax,
    "gdpo": gdpo,
}
