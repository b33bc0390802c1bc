"""Advantages of response tokens from their rewards: one response at a time, by the definitions."""

from __future__ import annotations

from collections.abc import Sequence

Rows = tuple[list[float], list[float]]
"""Advantages and returns of a response."""


def gae(rewards: Sequence[float], values: Sequence[float], *, gamma: float = 1.0, lam: float = 0.95) -> Rows:
    """A[t] = sum over k of (gamma * lam)^k * delta[t + k], the value after the last token 0; returns = A + V."""
    advantages = _decayed(_deltas(rewards, values, gamma), gamma * lam)
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def vapo(
    rewards: Sequence[float],
    values: Sequence[float],
    *,
    gamma: float = 1.0,
    lam_value: float = 1.0,
    length_alpha: float = 0.05,
) -> Rows:
    """Returns with one lambda, advantages with clip(1 - 1 / (alpha * length), 0, 1), the product at least 1."""
    lam_policy = min(max(1 - 1 / max(length_alpha * len(rewards), 1.0), 0.0), 1.0)
    advantages, _ = gae(rewards, values, gamma=gamma, lam=lam_policy)
    _, returns = gae(rewards, values, gamma=gamma, lam=lam_value)
    return advantages, returns


def reward_to_go(rewards: Sequence[float], values: Sequence[float] = (), *, gamma: float = 1.0) -> Rows:
    """G[t] = sum over k of gamma^k * r[t + k], as both."""
    del values
    returns = _decayed(rewards, gamma)
    return returns, list(returns)


def _deltas(rewards: Sequence[float], values: Sequence[float], gamma: float) -> list[float]:
    after = [*values, 0.0][1:]
    return [r + gamma * v_next - v for r, v, v_next in zip(rewards, values, after, strict=True)]


def _decayed(numbers: Sequence[float], factor: float) -> list[float]:
    return [sum(factor**k * number for k, number in enumerate(numbers[t:])) for t in range(len(numbers))]
