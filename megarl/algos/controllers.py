"""Coefficients that follow what they cause."""

from __future__ import annotations


def adaptive_kl_coef(coef: float, *, observed_kl: float, episodes: int, target: float, horizon: float) -> float:
    """The KL coefficient after an iteration: coef * (1 + e * episodes / horizon).

    e = observed_kl / target - 1, kept within +-0.2.

    Source: Ziegler et al., "Fine-tuning language models from human preferences" (2019), section 2.2.

    Args:
        coef: before.
        observed_kl: nats per sequence, the mean over all samples of the iteration and all ranks.
        episodes: samples of the iteration, over all ranks.
        target: nats per sequence.
        horizon: episodes.
    """
    error = min(max(observed_kl / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * episodes / horizon)
