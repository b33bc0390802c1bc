"""Tokens, scores, KL and rewards."""

from __future__ import annotations

from typing import Any

import torch

from megarl.algos import kl, reward_shaping
from megarl.algos.kl import KLController
from megarl.algos.reward_shaping import dense_rewards, kl_penalties, token_rewards
from megarl.megatron.logprobs import VocabShard, logprobs_and_entropy
from megarl.rewards.functions import soft_overlong
from tests.algos.adapters import padding
from tests.algos.adapters.common import Args, Runner, done, floats, pick, take, take_mask
from tests.rewards.completions import completion

KL_ESTIMATORS = {
    "k1": kl.k1,
    "k2": kl.k2,
    "mse": kl.k2,
    "k3": kl.k3,
    "low_var_kl": kl.k3,
    "abs": kl.absolute,
    "k1+": kl.k1_plus,
    "k3+": kl.k3_plus,
}
PLACES_OF_PADDED_ROWS = {"last_column": padding.last_column, "after_last": padding.after_last}


class Alone:
    """The group of a rank without others."""

    def size(self) -> int:
        return 1


def token_statistics(args: Args) -> Args:
    """The logits are the hidden states; the output layer is the identity."""
    (logits,), (labels,) = floats(args, "logits"), take(args, "labels")
    vocabulary = logits.shape[-1]
    shard = VocabShard(group=Alone(), start=0, size=vocabulary)  # type: ignore[arg-type]
    logprobs, entropy = logprobs_and_entropy(
        logits.reshape(-1, vocabulary),
        torch.eye(vocabulary),
        labels.reshape(-1),
        shard,
        temperature=args.pop("temperature", 1.0),
    )
    done(args)
    return {"logprobs": logprobs.reshape(labels.shape), "entropy": entropy.reshape(labels.shape)}


def position_ids(args: Args) -> Args:
    """Any other style is the one other convention that the specification has."""
    exclusive = args.pop("style", "exclusive_cumsum") == "exclusive_cumsum"
    place = padding.position_ids if exclusive else padding.position_ids_with_padding_at_one
    return {"position_ids": place(*take(args, "attention_mask"))}


def left_pad(args: Args) -> Args:
    return {"tokens": padding.left_pad(*take(args, "tokens"), args["pad"])}


def lengths_from_eos(args: Args) -> Args:
    (responses,) = take(args, "responses")
    kept, found = reward_shaping.first_end(responses, torch.ones_like(responses).bool(), args.pop("eos_ids"))
    done(args)
    return {"mask": kept.long(), "lengths": kept.sum(-1), "ended": found}


def truncate_at_token(args: Args) -> Args:
    (responses,) = take(args, "responses")
    all_of_it = torch.ones_like(responses).bool()
    kept, found = reward_shaping.first_end(responses, all_of_it, [args.pop("token")], after=args.pop("start", 0))
    truncated = responses.masked_fill(~kept, args.pop("pad"))
    done(args)
    return {"responses": truncated, "has_token": found}


def score_without_token(args: Args) -> Args:
    (values,), found = floats(args, "scores"), take_mask(args, "has_token")
    rules = {
        "replace": lambda value: reward_shaping.replace_missing_end(values, found, score=value),
        "subtract": lambda value: reward_shaping.subtract_missing_end(values, found, penalty=value),
        "scale": lambda value: reward_shaping.scale_missing_end(values, found, factor=value),
        "zero": lambda _: reward_shaping.zero_missing_end(values, found),
    }
    return {"scores": pick(rules, args["mode"])(args.get("value"))}


def stop_properly(args: Args) -> Args:
    (rewards,), finished = floats(args, "rewards"), ~take_mask(args, "truncated")
    coef = args.pop("coef")
    done(args)
    if coef < 0:
        return {"rewards": reward_shaping.replace_missing_end(rewards, finished, score=coef)}
    return {"rewards": reward_shaping.scale_missing_end(rewards, finished, factor=coef)}


def overlong_penalty(args: Args) -> Args:
    options = {"penalty": args.pop("factor", 1.0), "capped": args.pop("cap", True)}
    limits = {"max_tokens": args.pop("max_len"), "buffer_tokens": args.pop("buffer_len")}
    penalties = [soft_overlong(completion(tokens=tokens), **limits, **options) for tokens in args.pop("lengths")]
    done(args)
    return {"penalty": penalties}


def head_init_std(args: Args) -> Args:
    """Any other style is the one other rule that the specification has."""
    usual = args.get("style", "inv_sqrt_d_plus_1") == "inv_sqrt_d_plus_1"
    return {"std": reward_shaping.head_std(args["hidden"], rule="inverse_sqrt" if usual else "inverse")}


def reward_norm(args: Args) -> Args:
    (samples,) = floats(args, "samples")
    targets = {name: args.pop(name) for name in ("target_mean", "target_std", "ddof") if name in args}
    done(args)
    scale = reward_shaping.score_scale(samples, **targets)
    return {
        "mean": scale.mean,
        "std": scale.std,
        "gain": scale.gain,
        "bias": scale.bias,
        "normalized": scale.apply(samples),
    }


def kl_estimate(args: Args) -> Args:
    logprobs, ref = floats(args, "logp", "ref")
    given = args.pop("importance", None)
    importance = None if given is None else torch.tensor(given)
    estimator = pick(KL_ESTIMATORS, args.pop("kind", "k1"))
    limits = {"max_log_ratio": args.pop("in_clamp", None), "limit": args.pop("out_clamp", None)}
    done(args)
    estimates = estimator(logprobs.requires_grad_(), ref, importance, **limits)
    (grad,) = torch.autograd.grad(estimates.sum(), logprobs)
    return {"kl": estimates, "grad": grad}


def kl_full(args: Args) -> Args:
    return {"kl": kl.full(*floats(args, "logits", "ref_logits"))}


def run_controller(args: Args) -> Args:
    fixed = args["kind"] == "fixed"
    controller = KLController(
        args["init"], target=None if fixed else args["target"], horizon=args.get("horizon") or 1.0
    )
    values: list[Any] = []
    for observed, samples in args["updates"]:
        controller.update(observed, samples)
        values.append(controller.coef)
    return {"values": values}


def interval(clip: Any) -> tuple[float, float] | None:
    """Bounds; a number alone is both, below and above 0."""
    return clip if clip is None else tuple(clip) if isinstance(clip, list) else (-clip, clip)


def shape_rewards(args: Args) -> Args:
    (values, divergence), mask = floats(args, "scores", "kl"), take_mask(args)
    clip, placement = interval(args.pop("clip", None)), args.pop("placement", "last_valid")
    penalties = kl_penalties(divergence, mask, kl_coef=args.pop("coef"))
    done(args)
    if clip is not None:
        values = reward_shaping.clip_scores(values, *clip)
    if placement in PLACES_OF_PADDED_ROWS:
        mask, placement = PLACES_OF_PADDED_ROWS[placement](mask), "last_valid"
    return {"rewards": token_rewards(values, penalties, mask, placement=placement), "non_score": penalties}


def run_dense_rewards(args: Args) -> Args:
    (divergence, dense), mask = floats(args, "kl", "dense"), take_mask(args)
    penalties = kl_penalties(divergence, mask, kl_coef=args.pop("coef"))
    options = {"clip": interval(args.pop("clip", None)), "differences": args.pop("delta", False)}
    done(args)
    return {"rewards": dense_rewards(dense[:, :-1], dense[:, 1:], penalties, mask, **options)}


RUNNERS: dict[str, Runner] = {
    "token_statistics": token_statistics,
    "position_ids": position_ids,
    "left_pad": left_pad,
    "lengths_from_eos": lengths_from_eos,
    "truncate_at_token": truncate_at_token,
    "score_without_token": score_without_token,
    "stop_properly": stop_properly,
    "overlong_penalty": overlong_penalty,
    "head_init_std": head_init_std,
    "reward_norm": reward_norm,
    "kl_estimate": kl_estimate,
    "kl_full": kl_full,
    "kl_controller": run_controller,
    "shape_rewards": shape_rewards,
    "dense_rewards": run_dense_rewards,
}
