"""Vectors of tokens, scores, KL, rewards, selection and metrics; see vector_adapter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megarl.algos import kl, metrics, optimization, reward_shaping, selection
from megarl.algos.kl import KLController, k1
from megarl.algos.optimization import divided, exceeds_target, tensorflow_eps
from megarl.algos.registry import KL_ESTIMATORS
from megarl.algos.reward_shaping import first_end, kl_penalties, token_rewards
from megarl.algos.value_loss import ValueMoments, mse
from megarl.megatron.logprobs import VocabShard, logprobs_and_entropy
from megarl.rewards.functions import soft_overlong
from tests.algos.inputs import local
from tests.algos.vectors_of_losses import mean
from tests.rewards.completions import completion

Outputs = dict[str, Any]


class Alone:
    """The group of a rank without others."""

    def size(self) -> int:
        return 1


def token_statistics(*, logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Outputs:
    """The logits are the hidden states; the output layer is the identity."""
    size = logits.shape[-1]
    shard = VocabShard(group=Alone(), start=0, size=size)  # type: ignore[arg-type]
    logprobs, entropy = logprobs_and_entropy(
        logits.reshape(-1, size), torch.eye(size), labels.reshape(-1), shard, temperature=temperature
    )
    return {"logprobs": logprobs.reshape(labels.shape), "entropy": entropy.reshape(labels.shape)}


def lengths_from_eos(*, responses: Tensor, eos_ids: list[int]) -> Outputs:
    kept, found = first_end(responses, torch.ones_like(responses).bool(), eos_ids)
    return {"mask": kept.long(), "lengths": kept.sum(-1), "ended": found}


def truncate_at_token(*, responses: Tensor, token: int, pad: int, start: int = 0) -> Outputs:
    kept, found = first_end(responses, torch.ones_like(responses).bool(), [token], after=start)
    return {"responses": responses.masked_fill(~kept, pad), "has_token": found}


def score_without_token(*, scores: Tensor, has_token: Tensor, mode: str, value: float) -> Outputs:
    assert mode == "replace"
    return {"scores": reward_shaping.replace_missing_end(scores, has_token, score=value)}


def stop_properly(*, rewards: Tensor, truncated: Tensor, coef: float) -> Outputs:
    return {"rewards": reward_shaping.scale_missing_end(rewards, ~truncated, factor=coef)}


def overlong_penalty(
    *, lengths: Tensor, max_len: int, buffer_len: int, factor: float = 1.0, cap: bool = True
) -> Outputs:
    limits: Any = {"max_tokens": max_len, "buffer_tokens": buffer_len, "penalty": factor, "capped": cap}
    return {"penalty": [soft_overlong(completion(tokens=tokens), **limits) for tokens in lengths.tolist()]}


def head_init_std(*, hidden: int) -> Outputs:
    return {"std": reward_shaping.head_std(hidden)}


def reward_norm(*, samples: Tensor, **options: Any) -> Outputs:
    scale = reward_shaping.score_scale(samples, **options)
    normalized = scale.apply(samples)
    return {"mean": scale.mean, "std": scale.std, "gain": scale.gain, "bias": scale.bias, "normalized": normalized}


def kl_estimate(
    *,
    logp: Tensor,
    ref: Tensor,
    kind: str = "k1",
    importance: Tensor | None = None,
    in_clamp: float | None = None,
    out_clamp: float | None = None,
) -> Outputs:
    limits = {"max_log_ratio": in_clamp, "limit": out_clamp}
    estimates = KL_ESTIMATORS.function(kind)(logp.requires_grad_(), ref, importance, **limits)
    return {"kl": estimates, "grad": torch.autograd.grad(estimates.sum(), logp)[0]}


def kl_full(*, logits: Tensor, ref_logits: Tensor) -> Outputs:
    return {"kl": kl.full(logits, ref_logits)}


def kl_controller(*, kind: str, init: float, target: float, horizon: float, updates: list[Any]) -> Outputs:
    assert kind == "adaptive"
    controller = KLController(init, target=target, horizon=horizon)
    values: list[float] = []
    for observed, samples in updates:
        controller.update(observed, samples)
        values.append(controller.coef)
    return {"values": values}


def shape_rewards(
    *, scores: Tensor, kl: Tensor, mask: Tensor, coef: float, clip: Any = None, placement: Any = "last_valid"
) -> Outputs:
    penalties = kl_penalties(kl, mask, kl_coef=coef)
    if clip is not None:
        scores = reward_shaping.clip_scores(scores, *clip)
    return {"rewards": token_rewards(scores, penalties, mask, placement=placement), "non_score": penalties}


def dense_rewards(*, kl: Tensor, dense: Tensor, mask: Tensor, coef: float, clip: float, delta: bool) -> Outputs:
    penalties = kl_penalties(kl, mask, kl_coef=coef)
    rewards = reward_shaping.dense_rewards(
        dense[:, :-1], dense[:, 1:], penalties, mask, clip=(-clip, clip), differences=delta
    )
    return {"rewards": rewards}


# ---- optimization


def adam(
    *, params: Tensor, grads: Tensor, lr: float, beta2: float = 0.999, eps: float = 1e-5, style: str = "tensorflow"
) -> Outputs:
    """torch's AdamW, whose epsilon follows the schedule as in training."""
    optimizer = torch.optim.AdamW([params], lr=lr, betas=(0.9, beta2), eps=eps, weight_decay=0.0)
    course: list[Any] = []
    for step, gradient in enumerate(grads, start=1):
        params.grad = gradient
        if style == "tensorflow":
            optimizer.param_groups[0]["eps"] = tensorflow_eps(eps, beta2, step)
        optimizer.step()
        course.append(params.tolist())
    return {"params": course}


def ema(*, ema0: Tensor, params: Tensor) -> Outputs:
    course: list[Any] = []
    for parameters in params:
        ema0 = optimization.ema(ema0, parameters, decay=0.992)
        course.append(ema0.tolist())
    return {"ema": course}


def linear_anneal(*, lr: float, index: list[int], total: int) -> Outputs:
    return {"lr": [optimization.linear_anneal(lr, i, total) for i in index]}


def minibatch_plan(
    *, batch_size: int, num_minibatches: int, accumulation: int, permutations: list[list[int]]
) -> Outputs:
    plan: list[Any] = []
    for permutation in permutations:
        assert len(permutation) == batch_size
        plan.append([divided(members, accumulation) for members in divided(permutation, num_minibatches)])
    return {"plan": plan}


def early_stop(*, policy_kls: list[float], target_kl: float) -> Outputs:
    for epoch, observed in enumerate(policy_kls, start=1):
        if exceeds_target(observed, target=target_kl):
            return {"epochs_run": epoch, "stopped": True}
    return {"epochs_run": len(policy_kls), "stopped": False}


def value_rms(*, batches: list[Any], masks: list[Any], beta: float, probe: Tensor) -> Outputs:
    moments = ValueMoments()
    for batch, mask in zip(batches, masks, strict=True):
        moments = moments.update(torch.tensor(batch), torch.tensor(mask).bool(), local, beta=beta)
    mean, std = moments.mean_and_std()
    return {
        "mean": mean,
        "std": std,
        "normalized": moments.normalise(probe),
        "denormalized": moments.denormalise(probe),
    }


# ---- selection and metrics


def raft_select(*, rewards: Tensor, strategy: str, k: int = 1, discard: Tensor | None = None) -> Outputs:
    discarded = torch.zeros_like(rewards).bool() if discard is None else discard
    groups = torch.arange(len(rewards)).repeat_interleave(k)[: len(rewards)]
    assert strategy == "local"
    return {"indices": selection.best_of_groups(rewards, groups, discarded)}


def dynamic_filter(*, group_rewards: list[list[float]]) -> Outputs:
    default = torch.get_default_dtype()
    return {"keep": [selection.nonzero_std(torch.tensor(own, dtype=default)) for own in group_rewards]}


def objective_metrics(*, scores: Tensor, logp: Tensor, ref: Tensor, mask: Tensor, kl_coef: float) -> Outputs:
    divergence = k1(logp, ref)
    drift = metrics.averaged(metrics.policy_drift(logp, divergence, mask), local)
    penalties = kl_penalties(divergence, mask, kl_coef=kl_coef)
    found = {**drift, **metrics.objective_metrics(scores, penalties, mask, reduce=local)}
    return {
        **found,
        "objective/score_total": found["objective/rlhf_reward"],
        "kl_per_token_mean": found["objective/kl_per_token"],
        "kl_seq_mean_mean": found["objective/kl_token_mean"],
    }


def explained_variance(*, returns: Tensor, values: Tensor, vpred: Tensor, mask: Tensor) -> Outputs:
    found = metrics.value_metrics(returns, values, mask, reduce=local)
    error = mse(vpred, values, returns).metrics["error"]
    openai = metrics.explained_variance(float(mean(error, mask)), found["returns/var"])
    return {"verl": found["value/explained_variance"], "openai": openai}
