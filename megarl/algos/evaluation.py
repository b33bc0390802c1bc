"""Estimates from samples of held-out prompts, and their errors."""

from __future__ import annotations

import math

import torch
from torch import Tensor


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
