"""Metrics of an iteration's samples, over all ranks, and estimates from held-out prompts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megarl.algos.normalization import Reduce, masked_moments, on_mask
from megarl.algos.policy_loss import MAX_LOG_RATIO, row_mean


def rollout_gap(old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor, *, reduce: Reduce) -> float:
    """Mean |old - rollout| in nats per token: how far trainer and engine disagree about the same tokens.

    With the same weights, and without top-p and top-k, which the engine's numbers contain, only rounding is left.

    Args:
        reduce: called once, whether this rank has rows or not.
    """
    gaps = (old_logprobs - rollout_logprobs).abs()[response_mask].double()
    tokens, total = reduce(torch.stack([gaps.new_tensor(gaps.numel()), gaps.sum()])).unbind()
    return float(total) / max(float(tokens), 1.0)


def mismatch_metrics(
    old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor, *, reduce: Reduce
) -> dict[str, float]:
    """How far the trainer's policy is from the one that sampled, d = old - rollout, clamped to +-20 in exponents.

    Source: verl's and NeMo-RL's rollout metrics.

    Args:
        reduce: called once, whether this rank has rows or not.

    Returns:
        Means over tokens: ``rollout_corr/kl``, -d nats; ``k3_kl``, exp(d) - 1 - d nats; ``chi2_token``,
        exp(2 * d) - 1; ``mult_prob_error``, exp(abs(d)). Means over sequences: ``training_ppl`` and ``rollout_ppl``,
        exp(-mean(old)) and exp(-mean(rollout)); ``ppl_ratio``, exp(-mean(d)); ``chi2_sequence``,
        exp(2 * sum(d)) - 1.
    """
    old, rollout = old_logprobs.double(), rollout_logprobs.double()
    difference = on_mask(old - rollout, response_mask)
    near = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    of_tokens = {
        "rollout_corr/kl": -difference,
        "rollout_corr/k3_kl": torch.expm1(near) - near,
        "rollout_corr/chi2_token": torch.expm1(2 * near),
        "rollout_corr/mult_prob_error": near.abs().exp(),
    }
    of_sequences = {
        "rollout_corr/training_ppl": (-row_mean(old, response_mask)).exp(),
        "rollout_corr/rollout_ppl": (-row_mean(rollout, response_mask)).exp(),
        "rollout_corr/ppl_ratio": (-row_mean(difference, response_mask)).exp(),
        "rollout_corr/chi2_sequence": torch.expm1(
            2 * difference.sum(-1, keepdim=True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ),
    }
    counts = {**dict.fromkeys(of_tokens, response_mask), **dict.fromkeys(of_sequences, response_mask.any(-1, True))}
    sums = {name: values[counts[name]].sum() for name, values in {**of_tokens, **of_sequences}.items()}
    numbers = [counts[name].sum().double() for name in sums]
    totals, over = reduce(torch.stack([*sums.values(), *numbers])).view(2, -1)
    means = (totals / over.clamp(min=1)).unbind()
    return {name: float(mean) for name, mean in zip(sums, means, strict=True)}


def correction_metrics(
    weights: Tensor, old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor, *, reduce: Reduce
) -> dict[str, float]:
    """The effect of rollout corrections on the tokens of a step; a kept token is one whose weight is not 0.

    Args:
        weights: [B, R], of ``rollout_correction``, keep masks multiplied in.
        reduce: called once, whether this rank has rows or not.

    Returns:
        ``rollout_corr/weight_mean``, over all tokens; ``ess``, the effective share of the tokens,
        sum(w)^2 / (n * sum(w^2)); ``changed_fraction``, tokens whose weight is not exp(old - rollout);
        ``kept_fraction``; ``kept_weight_mean`` and ``kept_log_ratio``, old - rollout nats, over the kept tokens, where
        there are any.
    """
    counted = on_mask(weights, response_mask)
    kept = counted != 0
    difference = old_logprobs - rollout_logprobs
    is_changed = response_mask & (weights != difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp())
    own = [
        response_mask.sum(),
        kept.sum(),
        is_changed.sum(),
        counted.double().sum(),
        counted.double().square().sum(),
        difference[kept].double().sum(),
    ]
    sums = reduce(torch.stack([x.double() for x in own]))
    tokens, kept_tokens, changed, total, squares, log_ratios = (float(x) for x in sums)
    metrics = {
        "rollout_corr/weight_mean": total / max(tokens, 1.0),
        "rollout_corr/ess": total * total / (tokens * squares) if squares else 0.0,
        "rollout_corr/changed_fraction": changed / max(tokens, 1.0),
        "rollout_corr/kept_fraction": kept_tokens / max(tokens, 1.0),
    }
    if kept_tokens:
        metrics["rollout_corr/kept_weight_mean"] = total / kept_tokens
        metrics["rollout_corr/kept_log_ratio"] = log_ratios / kept_tokens
    return metrics


def objective_metrics(
    scores: Tensor, old_logprobs: Tensor, kl: Tensor | None, penalties: Tensor, response_mask: Tensor, *, reduce: Reduce
) -> dict[str, float]:
    """Means over sequences, in the definitions of lm-human-preferences.

    Args:
        kl: [B, R] nats, the divergence from the reference; None without one, on all ranks.
        penalties: [B, R], the rewards without the score.
        response_mask: [B, R] bool.
        reduce: called once, whether this rank has rows or not.

    Returns:
        ``objective/kl``, nats per sequence; ``objective/kl_per_token``, the mean over tokens, and
        ``objective/kl_token_mean``, the mean over sequences of the means over their tokens; ``objective/entropy``, the
        mean of -sum(old) nats; ``objective/score``; ``objective/non_score_reward``; ``objective/rlhf_reward``, the two
        together. Nothing of the divergence without a reference, and nothing at all where no rank has rows.
    """
    drift = torch.zeros_like(old_logprobs) if kl is None else kl
    sums = [
        torch.tensor(float(len(scores)), dtype=torch.float64, device=drift.device),
        response_mask.sum().double(),
        on_mask(drift, response_mask).double().sum(),
        row_mean(drift.double(), response_mask).sum(),
        on_mask(-old_logprobs, response_mask).double().sum(),
        on_mask(penalties, response_mask).double().sum(),
        scores.double().sum(),
    ]
    sequences, tokens, kl_sum, kl_means, entropy, non_score, score = (
        float(total) for total in reduce(torch.stack(sums))
    )
    if not sequences:
        return {}
    divergence = {
        "objective/kl": kl_sum / sequences,
        "objective/kl_per_token": kl_sum / max(tokens, 1.0),
        "objective/kl_token_mean": kl_means / sequences,
    }
    return {
        **({} if kl is None else divergence),
        "objective/entropy": entropy / sequences,
        "objective/score": score / sequences,
        "objective/non_score_reward": non_score / sequences,
        "objective/rlhf_reward": (score + non_score) / sequences,
    }


def value_metrics(returns: Tensor, old_values: Tensor, response_mask: Tensor, *, reduce: Reduce) -> dict[str, float]:
    """How well the values predicted the returns, over all counting tokens.

    Args:
        old_values: [B, R], of the critic before the update.
        reduce: called six times, whether this rank has rows or not.

    Returns:
        ``value/explained_variance``, 1 - var(returns - values) / (var(returns) + 1e-5): 1 is perfect, and 0 no better
        than a constant; ``value/mean`` and ``value/var``; ``returns/mean`` and ``returns/var``. Nothing where no token
        of any rank counts.
    """
    target = masked_moments(returns, response_mask, reduce)
    error = masked_moments(returns - old_values, response_mask, reduce)
    values = masked_moments(old_values, response_mask, reduce)
    if not target.count:
        return {}
    return {
        "value/explained_variance": float(1 - error.sample_variance / (target.sample_variance + 1e-5)),
        "value/mean": float(values.mean),
        "value/var": float(values.variance),
        "returns/mean": float(target.mean),
        "returns/var": float(target.variance),
    }


def explained_variance(error: float, variance: float) -> float:
    """1 - error / variance: how well the values of a critic in training predict the returns that it is trained on.

    The form of lm-human-preferences, with the new values; ``value_metrics`` has the one of verl, with the old.

    Args:
        error: mean over tokens of the squared error of the new values (``value/error``).
        variance: population variance of the returns over the same tokens (``returns/var``).
    """
    return 1 - error / max(variance, 1e-8)


def group_metrics(scores: Tensor, groups: Tensor) -> dict[str, float]:
    """How much the samples of a prompt differ: where they do not, there is nothing to learn from comparing them.

    Args:
        scores: [B], of all samples of a step.
        groups: [B] int, the number of each sample's prompt, from 0 on.

    Returns:
        ``group/std_mean``, the mean over prompts of the population deviation of their scores;
        ``group/zero_std_fraction``, the share of prompts whose samples all score the same.
    """
    members = [scores[groups == group] for group in range(int(groups.max()) + 1)]
    deviations = torch.stack([own.std(correction=0) for own in members])
    equal = torch.stack([own.min() == own.max() for own in members])
    return {"group/std_mean": float(deviations.mean()), "group/zero_std_fraction": float(equal.float().mean())}


def pass_rate(successes: Tensor, samples: Tensor, *, k: int) -> Tensor:
    """The probability that one of k samples of a prompt is a success, from n samples of which c are.

        1 - C(n - c, k) / C(n, k) = 1 - prod_{i < k} (n - c - i) / (n - i)

    It is the mean over all sets of k of the n samples, and so has no bias; 1 - (1 - c / n)^k would be too low.
    Source: Chen et al. 2021, "Evaluating large language models trained on code".

    Args:
        successes: [G] int, c of each prompt.
        samples: [G] int, n of each prompt; k at least.

    Returns:
        [G] float64.
    """
    drawn = torch.arange(k)
    failures_left = (samples - successes).unsqueeze(1) - drawn
    samples_left = samples.unsqueeze(1) - drawn
    return 1 - (failures_left.clamp(min=0).double() / samples_left).prod(1)


def clustered_mean(values: Tensor, clusters: Tensor) -> tuple[float, float]:
    """The mean of values and its standard error, where those of a cluster depend on each other.

        mean = sum(x) / N,  error^2 = G / (G - 1) * sum_g (sum_{i in g} (x_i - mean))^2 / N^2

    Samples of one prompt are alike: counting them as independent makes the error too small. With clusters of one size
    it is the standard error of the mean of the clusters' means, with clusters of one value the ordinary one.
    Source: Liang and Zeger 1986, "Longitudinal data analysis using generalized linear models".

    Args:
        values: [N], any number of them.
        clusters: [N] int64, the number of each value's cluster, from 0 on.

    Returns:
        The mean, NaN without values, and its standard error, NaN with fewer than two clusters.
    """
    values = values.double()
    mean = values.mean()
    residuals = torch.bincount(clusters, weights=values - mean)
    groups = int(torch.bincount(clusters).count_nonzero())
    if groups < 2:
        return float(mean), math.nan
    variance = groups / (groups - 1) * residuals.square().sum() / len(values) ** 2
    return float(mean), float(variance.sqrt())
