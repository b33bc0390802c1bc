"""The actor's losses: one number per token of one response.

Each takes the log-probabilities of now and of before the update, and the advantages, [R] each.
"""

from __future__ import annotations

import torch
from torch import Tensor

Loss = tuple[Tensor, Tensor]
"""The loss of each token, and whether clipping made it what it is (0 or 1)."""


def ppo(
    new: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    clip: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    ratio_clamp: tuple[float, float] | None = None,
) -> Loss:
    """max(-A r, -A clamp(r, 1 - clip, 1 + clip_high)); of negative advantages at most -A dual_clip."""
    ratio = torch.exp(new - old)
    if ratio_clamp is not None:
        ratio = ratio.clamp(*ratio_clamp)
    return _clipped(ratio, advantages, clip, clip_high, dual_clip)


def gspo(
    new: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    clip: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
) -> Loss:
    """PPO's loss with the geometric mean of the ratios of the whole response in place of each."""
    ratio = torch.exp((new - old).mean()).expand(len(new))
    return _clipped(ratio, advantages, clip, clip_high, dual_clip)


def cispo(
    new: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    clip: float = 1.0,
    clip_high: float | None = None,
    upper_only: bool = False,
) -> Loss:
    """-clamp(r, 1 - clip, 1 + clip_high) A log p, no gradient through the ratio."""
    ratio = torch.exp(new - old).detach()
    high = 1 + (clip if clip_high is None else clip_high)
    bounded = ratio.clamp(max=high) if upper_only else ratio.clamp(1 - clip, high)
    return -bounded * advantages * new, (bounded != ratio).float()


def sapo(new: Tensor, old: Tensor, advantages: Tensor, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Loss:
    """-A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of the advantage."""
    terms = []
    for now, before, advantage in zip(new, old, advantages, strict=True):
        tau = tau_pos if advantage > 0 else tau_neg
        terms.append(-advantage * 4 / tau / (1 + torch.exp(-tau * (torch.exp(now - before) - 1))))
    return torch.stack(terms), torch.zeros(len(new))


def gmpo(new: Tensor, old: Tensor, advantages: Tensor, *, clip: float = 0.4, clip_high: float | None = None) -> Loss:
    """-mean(A) exp(mean of the log-ratios), each log-ratio clipped on the side of its advantage's sign."""
    high = clip if clip_high is None else clip_high
    terms, counts = [], []
    for now, before, advantage in zip(new, old, advantages, strict=True):
        difference = now - before
        bounded = difference.clamp(-clip, high)
        sign = torch.sign(advantage)
        terms.append(bounded if sign * bounded < sign * difference else difference)
        counts.append(float(sign * bounded < sign * difference))
    loss = -advantages.mean() * torch.exp(torch.stack(terms).mean())
    return loss.expand(len(new)), torch.tensor(counts)


def reinforce(new: Tensor, old: Tensor, advantages: Tensor) -> Loss:
    """-A log p."""
    del old
    return -advantages * new, torch.zeros(len(new))


def _clipped(ratio: Tensor, advantages: Tensor, clip: float, clip_high: float | None, dual_clip: float | None) -> Loss:
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip, 1 + (clip if clip_high is None else clip_high))
    loss = torch.where(clipped > unclipped, clipped, unclipped)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        loss = torch.where((advantages < 0) & (bound < loss), bound, loss)
    return loss, (clipped > unclipped).float()
