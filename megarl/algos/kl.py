"""Estimators of KL(policy || reference) in nats from the log-probabilities of the sampled tokens.

With d = log policy - log reference at a token sampled from the policy, each is an estimate per token (J. Schulman,
"Approximating KL divergence", 2020). All are elementwise, and differentiable in ``logprobs``, for a penalty in the
loss: the gradients are 1 (k1, whose mean over the policy's tokens is 0: as a loss it pulls nowhere), d (k2) and
1 - exp(-d) (k3).
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """d: unbiased, of either sign."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """d^2 / 2: biased, never negative; its gradient is an unbiased one of the KL."""
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased, never negative. d is clamped to +-20, the estimate to 10, without a gradient there."""
    d = (logprobs - ref_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (torch.expm1(-d) + d).clamp(max=MAX_K3)
