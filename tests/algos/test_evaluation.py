"""pass@k by trying every set of k samples, and the standard error of a mean by a bootstrap over prompts."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest
import torch

from megarl.algos.metrics import clustered_mean, pass_rate


def test_pass_rate_is_the_fraction_of_k_subsets_with_a_success() -> None:
    cases = [(n, c, k) for n in range(1, 8) for c in range(n + 1) for k in range(1, n + 1)]
    for n, c, k in cases:
        sets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        expected = sum(any(chosen) for chosen in sets) / len(sets)
        found = pass_rate(torch.tensor([c]), torch.tensor([n]), k=k)
        assert found.dtype == torch.float64
        assert found.item() == pytest.approx(expected, abs=1e-12), (n, c, k)


def test_pass_rate_is_vectorised_and_takes_many_samples() -> None:
    rates = pass_rate(torch.tensor([0, 1, 500, 1000]), torch.tensor([4, 4, 1000, 1000]), k=2)
    assert rates.tolist() == pytest.approx([0, 0.5, 1 - (500 / 1000) * (499 / 999), 1])


@pytest.mark.parametrize(
    ("values", "clusters", "means"),
    [
        ([0.0, 1.0, 1.0, 0.0, 3.0], [4, 2, 0, 1, 3], [0.0, 1.0, 1.0, 0.0, 3.0]),
        ([1.0, 5.0, 3.0, 2.0, 2.0, 8.0], [0, 1, 2, 0, 1, 2], [1.5, 3.5, 5.5]),
    ],
)
def test_clusters_of_equal_size_have_the_standard_error_of_their_means(
    values: list[float], clusters: list[int], means: list[float]
) -> None:
    mean, error = clustered_mean(torch.tensor(values), torch.tensor(clusters))
    assert (mean, error) == pytest.approx((statistics.mean(means), statistics.stdev(means) / math.sqrt(len(means))))


def test_the_standard_error_equals_that_of_a_bootstrap_over_prompts() -> None:
    """A bootstrap over whole prompts, of different sizes and very different difficulty."""
    random = np.random.default_rng(0)
    prompts = [random.normal(random.normal(), 0.2, size=random.integers(1, 9)) for _ in range(60)]
    values = torch.from_numpy(np.concatenate(prompts))
    clusters = torch.repeat_interleave(torch.arange(60), torch.tensor([len(own) for own in prompts]))
    mean, error = clustered_mean(values, clusters)
    assert mean == pytest.approx(np.concatenate(prompts).mean())
    drawn = [np.concatenate([prompts[i] for i in random.integers(60, size=60)]).mean() for _ in range(4000)]
    assert error == pytest.approx(np.std(drawn), rel=0.06)  # the bootstrap has an error of its own, about 1%
    as_if_independent = float(values.std()) / math.sqrt(len(values))
    assert error > 1.5 * as_if_independent


def test_too_few_prompts_have_no_standard_error() -> None:
    mean, error = clustered_mean(torch.tensor([7.0, 9.0]), torch.tensor([3, 3]))
    assert mean == 8
    assert math.isnan(error)
    assert all(math.isnan(number) for number in clustered_mean(torch.zeros(0), torch.zeros(0, dtype=torch.int64)))
