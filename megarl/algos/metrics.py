"""Metrics of a step's samples, over all ranks, and estimates from held-out prompts; see docs/metrics.md.

Every rank calls ``reduce`` equally often, whether it has rows or not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from megarl.algos.normalization import Reduce, masked_moments, on_mask, reduced_sums
from megarl.algos.policy_loss import MAX_LOG_RATIO, ratio_of, row_mean

Means = Mapping[str, tuple[Tensor, Tensor]]
"""Metrics as sum and count, scalars that add up over micro-batches and ranks; a metric without a count is absent."""


def averaged(means: Means, reduce: Reduce) -> dict[str, float]:
    """The means over all ranks, in one reduction."""
    sums, counts = ([parts[column] for parts in means.values()] for column in (0, 1))
    totals = reduced_sums(reduce, *sums, *counts)
    pairs = zip(means, totals[: len(sums)], totals[len(sums) :], strict=True)
    return {name: total / count for name, total, count in pairs if count}


def mismatch(old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor) -> Means:
    """How far the trainer's policy is from the one that sampled: over tokens, and over sequences.

    d = old - rollout, and a sequence's sum of d, are clamped to +-20 before they are doubled or
    exponentiated. The gap, mean |d|, is rounding alone with the same weights. Source of the others:
    verl's and NeMo-RL's rollout metrics.
    """
    old = old_logprobs.double()
    rollout = rollout_logprobs.double()
    difference = on_mask(old - rollout, response_mask)
    near = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    by_token = {
        "rollout/logprob_gap": (old_logprobs - rollout_logprobs).abs().double(),
        "rollout_corr/kl": -difference,
        "rollout_corr/k3_kl": torch.expm1(near) - near,
        "rollout_corr/chi2_token": torch.expm1(2 * near),
        "rollout_corr/mult_prob_error": near.abs().exp(),
    }
    whole = difference.sum(-1, keepdim=True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    by_sequence = {
        "rollout_corr/training_ppl": (-row_mean(old, response_mask)).exp(),
        "rollout_corr/rollout_ppl": (-row_mean(rollout, response_mask)).exp(),
        "rollout_corr/ppl_ratio": (-row_mean(difference, response_mask)).exp(),
        "rollout_corr/chi2_sequence": torch.expm1(2 * whole),
    }
    means: dict[str, tuple[Tensor, Tensor]] = {}
    for values, mask in ((by_token, response_mask), (by_sequence, response_mask.any(-1, True))):
        for name, value in values.items():
            means[name] = (on_mask(value, mask).sum(), mask.sum())
    return means


def gaps_by_age(
    old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor, ages: Tensor, *, oldest: int
) -> Means:
    """Mean |old - rollout| of the tokens of each age, nats.

    Args:
        ages: [B, R] int, versions between the weights that sampled a token and the trainer's.
    """
    gaps = (old_logprobs - rollout_logprobs).abs()
    masks = {age: (ages == age) & response_mask for age in range(oldest + 1)}
    return {f"rollout/logprob_gap/age_{age}": (on_mask(gaps, mask).sum(), mask.sum()) for age, mask in masks.items()}


def correction_metrics(
    weights: Tensor, old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor, *, reduce: Reduce
) -> dict[str, float]:
    """The effect of rollout corrections on the tokens of a step; a kept token is one whose weight is not 0.

    Args:
        weights: [B, R], of ``rollout_correction``, keep masks multiplied in.
    """
    counted = on_mask(weights, response_mask)
    is_kept = counted != 0
    difference = old_logprobs - rollout_logprobs
    is_changed = response_mask & (weights != ratio_of(difference))
    tokens, kept, changed, total, squares, log_ratios = reduced_sums(
        reduce,
        response_mask.sum(),
        is_kept.sum(),
        is_changed.sum(),
        counted.double().sum(),
        counted.double().square().sum(),
        difference[is_kept].double().sum(),
    )
    metrics = {
        "rollout_corr/weight_mean": total / max(tokens, 1.0),
        "rollout_corr/ess": total * total / (tokens * squares) if squares else 0.0,
        "rollout_corr/changed_fraction": changed / max(tokens, 1.0),
        "rollout_corr/kept_fraction": kept / max(tokens, 1.0),
    }
    if kept:
        metrics["rollout_corr/kept_weight_mean"] = total / kept
        metrics["rollout_corr/kept_log_ratio"] = log_ratios / kept
    return metrics


def policy_drift(
    old_logprobs: Tensor, kl: Tensor | None, response_mask: Tensor, lengths: Tensor | None = None
) -> Means:
    """Divergence and entropy of whole responses, in the definitions of lm-human-preferences.

    Args:
        kl: [B, R] nats, from the reference; None on all ranks without one.
        lengths: [B] int64, response tokens of all branches of a row's conversation, which count as
            one response; None without branches.
    """
    tokens = response_mask.sum()
    counts = response_mask.sum(-1)
    shares = torch.ones_like(counts, dtype=torch.float64)
    if lengths is not None:
        shares = torch.where(lengths > 0, counts / lengths.clamp(min=1).double(), shares)
    sequences = shares.sum()
    means = {"objective/entropy": (on_mask(-old_logprobs, response_mask).double().sum(), sequences)}
    if kl is None:
        return means
    total = on_mask(kl, response_mask).double().sum()
    row_means = row_mean(kl.double(), response_mask).squeeze(-1)
    return {
        "objective/kl": (total, sequences),
        "objective/kl_per_token": (total, tokens),
        "objective/kl_token_mean": ((row_means * shares).sum(), sequences),
        **means,
    }


def objective_metrics(scores: Tensor, penalties: Tensor, response_mask: Tensor, *, reduce: Reduce) -> dict[str, float]:
    """Means over sequences, in the definitions of lm-human-preferences; empty where no rank has rows.

    Args:
        scores: [N], of conversations, which may have several rows.
        penalties: [B, R], the rewards without the score.
    """
    sequences, non_score, score = reduced_sums(
        reduce,
        torch.tensor(len(scores), device=scores.device),
        on_mask(penalties, response_mask).double().sum(),
        scores.double().sum(),
    )
    if not sequences:
        return {}
    return {
        "objective/score": score / sequences,
        "objective/non_score_reward": non_score / sequences,
        "objective/rlhf_reward": (score + non_score) / sequences,
    }


def value_metrics(returns: Tensor, old_values: Tensor, response_mask: Tensor, *, reduce: Reduce) -> dict[str, float]:
    """How well the critic's values before the update predict the returns; empty where no token of any rank counts.

    The explained variance is 1 - var(returns - values) / (var(returns) + 1e-5), with
    sample variances.
    """
    target = masked_moments(returns, response_mask, reduce)
    error = masked_moments(returns - old_values, response_mask, reduce)
    values = masked_moments(old_values, response_mask, reduce)
    if not target.count:
        return {}
    return {
        "value/explained_variance": float(1 - error.variance_of(1) / (target.variance_of(1) + 1e-5)),
        "value/mean": float(values.mean),
        "value/var": float(values.variance),
        "returns/mean": float(target.mean),
        "returns/var": float(target.variance),
    }


def explained_variance(error: float, variance: float) -> float:
    """1 - error / variance: lm-human-preferences' form, with new values; ``value_metrics`` has verl's, with old ones.

    Args:
        error: mean over tokens of the squared error of the new values (``value/error``).
        variance: population variance of the returns over the same tokens (``returns/var``).
    """
    return 1 - error / max(variance, 1e-8)


def group_metrics(scores: Tensor, groups: Tensor) -> dict[str, float]:
    """How much the scores of a prompt's samples differ, by the population deviation.

    Args:
        scores: [N], of all samples of a step.
        groups: [N] int, the number of each sample's prompt, from 0 on.
    """
    deviations: list[Tensor] = []
    equal: list[Tensor] = []
    for group in range(int(groups.max()) + 1):
        members = scores[groups == group]
        deviations.append(members.std(correction=0))
        equal.append(members.min() == members.max())
    return {
        "group/std_mean": float(torch.stack(deviations).mean()),
        "group/zero_std_fraction": float(torch.stack(equal).float().mean()),
    }


def pass_rate(successes: Tensor, samples: Tensor, *, k: int) -> Tensor:
    """The probability that one of k samples of a prompt is a success, from n samples of which c are.

        1 - C(n - c, k) / C(n, k) = 1 - prod_{i < k} (n - c - i) / (n - i)

    The mean over all sets of k of the n samples, so without bias; 1 - (1 - c / n)^k
    would be too low.
    Source: Chen et al. 2021, "Evaluating large language models trained on code".

    Args:
        successes, samples: [G] int, c and n of each prompt; n is at least k.
    """
    drawn = torch.arange(k)
    failures_left = (samples - successes).unsqueeze(1) - drawn
    samples_left = samples.unsqueeze(1) - drawn
    return 1 - (failures_left.clamp(min=0).double() / samples_left).prod(1)


def clustered_mean(values: Tensor, clusters: Tensor) -> tuple[float, float]:
    """The mean of values and its standard error, where the values of a cluster depend on each other.

        mean = sum(x) / N,  error^2 = G / (G - 1) * sum_g (sum_{i in g} (x_i - mean))^2 / N^2

    Samples of one prompt are alike: counting them as independent makes the error too small. With
    clusters of one size it is the standard error of the mean of the clusters' means, with clusters
    of one value the ordinary one. Source: Liang and Zeger 1986, "Longitudinal data analysis using
    generalized linear models".

    Args:
        values: [N]; without any, the mean is NaN.
        clusters: [N] int64, the number of each value's cluster, from 0 on; with fewer
            than two the error is NaN.
    """
    values = values.double()
    mean = values.mean()
    residuals = torch.bincount(clusters, weights=values - mean)
    groups = int(torch.bincount(clusters).count_nonzero())
    if groups < 2:
        return float(mean), math.nan
    variance = groups / (groups - 1) * residuals.square().sum() / len(values) ** 2
    return float(mean), float(variance.sqrt())
