"""Weights of tokens that another policy sampled: w = exp(old - rollout), before clipping.

Each takes the log-probabilities of a response by the trainer and by what sampled it, and gives a weight per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Numbers = Sequence[float]


def token_truncate(old: Numbers, rollout: Numbers, *, upper: float = 2.0, lower: float = 0.0) -> list[float]:
    """The ratio, cut to the bounds."""
    return [min(max(ratio, lower), upper) for ratio in _ratios(old, rollout)]


def token_mask(old: Numbers, rollout: Numbers, *, upper: float = 2.0, lower: float = 0.0) -> list[float]:
    """The ratio, 0 beyond the bounds."""
    return [ratio if lower <= ratio <= upper else 0.0 for ratio in _ratios(old, rollout)]


def sequence_truncate(old: Numbers, rollout: Numbers, *, upper: float = 2.0, lower: float = 0.0) -> list[float]:
    """The product of all ratios, cut to the bounds, for every token."""
    product = math.exp(sum(old) - sum(rollout))
    return [min(max(product, lower), upper)] * len(old)


def sequence_mask(old: Numbers, rollout: Numbers, *, upper: float = 2.0, lower: float = 0.0) -> list[float]:
    """The product of all ratios, 0 beyond the bounds, for every token."""
    product = math.exp(sum(old) - sum(rollout))
    return [product if lower <= product <= upper else 0.0] * len(old)


def geometric_truncate(old: Numbers, rollout: Numbers, *, upper: float = 2.0, lower: float = 0.0) -> list[float]:
    """The geometric mean of the ratios, cut to the bounds, for every token."""
    return [min(max(_geometric(old, rollout), lower), upper)] * len(old)


def geometric_mask(old: Numbers, rollout: Numbers, *, upper: float = 2.0, lower: float = 0.0) -> list[float]:
    """Each token's ratio; 0 for all of a response whose geometric mean is beyond the bounds."""
    inside = lower <= _geometric(old, rollout) <= upper
    return [ratio if inside else 0.0 for ratio in _ratios(old, rollout)]


def rejected(
    old: Numbers, rollout: Numbers, *, of: Callable[[float], float], level: str, lower: float, upper: float
) -> list[float]:
    """1 where a statistic of rollout / old, of the token or summed, averaged or maximal over the response, is inside.

    Args:
        of: the statistic of a token from log(rollout / old).
        level: token, sum, mean or max.
    """
    statistics = [of(r - o) for o, r in zip(old, rollout, strict=True)]
    whole = {"sum": sum(statistics), "mean": sum(statistics) / len(statistics), "max": max(statistics)}
    return [float(lower <= (own if level == "token" else whole[level]) <= upper) for own in statistics]


def off_policy_sequence(advantages: Numbers, old: Numbers, rollout: Numbers, *, delta: float = 1e-4) -> float:
    """0 for a response with a negative advantage that the rollout's policy found likelier by delta nats per token."""
    drift = (sum(rollout) - sum(old)) / len(old)
    return 0.0 if sum(advantages) < 0 and drift > delta else 1.0


def second_moment(differences: Sequence[Numbers], *, threshold: float) -> list[list[float]]:
    """0 for the tokens of largest squared log-ratio, as few as bring the mean of the others below the threshold."""
    squares = sorted(d**2 for row in differences for d in row)
    while squares and sum(squares) / len(squares) >= threshold:
        squares.pop()
    largest = squares[-1] if squares else -1.0
    return [[float(d**2 <= largest) for d in row] for row in differences]


def between(rollout: Numbers, new: Numbers, versions: Sequence[int], *, current: int) -> list[float]:
    """Log-probabilities between the rollout's policy and the newest, by the share of versions that have passed."""
    alphas = [min(max((current - 1 - v) / (current - v), 0.0), 1.0) if v < current else 0.0 for v in versions]
    return [r + alpha * (n - r) for r, n, alpha in zip(rollout, new, alphas, strict=True)]


def normalised(weights: Sequence[Numbers], *, by_sequence: bool = False) -> list[list[float]]:
    """Weights whose mean is 1: over all tokens, or over the responses, whose tokens weigh the same."""
    numbers = [w for row in weights for w in (row[:1] if by_sequence else row)]
    mean = sum(numbers) / len(numbers)
    return [[w / mean for w in row] for row in weights]


def _ratios(old: Numbers, rollout: Numbers) -> list[float]:
    return [math.exp(o - r) for o, r in zip(old, rollout, strict=True)]


def _geometric(old: Numbers, rollout: Numbers) -> float:
    return math.exp((sum(old) - sum(rollout)) / len(old))
