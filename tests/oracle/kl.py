"""Estimates of the KL divergence of the policy from the reference, one number per response token."""

from __future__ import annotations

import torch
from torch import Tensor


def k1(logprobs: Tensor, ref: Tensor) -> Tensor:
    """The log-ratio."""
    return logprobs - ref


def k2(logprobs: Tensor, ref: Tensor) -> Tensor:
    """Half its square."""
    return (logprobs - ref) ** 2 / 2


def k3(logprobs: Tensor, ref: Tensor) -> Tensor:
    """r - 1 - log r, of the ratio r of the reference to the policy."""
    return torch.exp(ref - logprobs) - 1 - (ref - logprobs)


def absolute(logprobs: Tensor, ref: Tensor) -> Tensor:
    """The size of the log-ratio."""
    return (logprobs - ref).abs()


def with_gradient_of_k2(logprobs: Tensor, ref: Tensor, *, value: Tensor) -> Tensor:
    """Another estimate's value, with the gradient of k2."""
    own = k2(logprobs, ref)
    return value.detach() + own - own.detach()


def k1_plus(logprobs: Tensor, ref: Tensor) -> Tensor:
    """k1 with the gradient of k2."""
    return with_gradient_of_k2(logprobs, ref, value=k1(logprobs, ref))


def k3_plus(logprobs: Tensor, ref: Tensor) -> Tensor:
    """k3 with the gradient of k2."""
    return with_gradient_of_k2(logprobs, ref, value=k3(logprobs, ref))


def full(logits: Tensor, ref_logits: Tensor, temperature: float) -> Tensor:
    """[R]: sum over the vocabulary of p (log p - log q)."""
    ours, theirs = (torch.log_softmax(x / temperature, -1) for x in (logits, ref_logits))
    return (ours.exp() * (ours - theirs)).sum(-1)


def jensen_shannon(logits: Tensor, ref_logits: Tensor, temperature: float) -> Tensor:
    """[R]: half of the KL of each from the mean of both."""
    ours, theirs = (torch.softmax(x / temperature, -1) for x in (logits, ref_logits))
    mean = (ours + theirs) / 2
    return sum((part * torch.log(part / mean)).sum(-1) / 2 for part in (ours, theirs))


def adapted(coef: float, kl: float, episodes: int, *, target: float, horizon: float) -> float:
    """The coefficient after a step of some episodes, whose KL was measured."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * episodes / horizon)
