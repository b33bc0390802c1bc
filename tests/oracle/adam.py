"""Adam by its formulas, after clipping.

- The gradient is scaled to clip_grad where its global norm is larger: by clip_grad / (norm + 1e-6).
- Decoupled weight decay leaves biases and one-dimensional parameters (norms) out.
- Step t divides m / (1 - b1^t) by sqrt(v / (1 - b2^t)) + eps (PyTorch), or multiplies the rate by
  sqrt(1 - b2^t) / (1 - b1^t) and divides m by sqrt(v) + eps (TensorFlow).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class AdamSettings:
    """Of one optimizer; ``clip_grad`` None does not clip, ``schedule`` has the factor of the rate by optimizer step."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float | None = 1.0
    tensorflow: bool = False
    schedule: Callable[[int], float] = lambda _: 1.0


@dataclass
class Adam:
    """The optimizer of one model."""

    model: nn.Module
    settings: AdamSettings
    steps: int = 0
    moments: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @torch.no_grad()
    def step(self) -> float:
        """Moves the parameters; returns the norm of the whole gradient before clipping."""
        s = self.settings
        parameters = {name: p for name, p in self.model.named_parameters() if p.grad is not None}
        norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in parameters.values()))
        scale = 1.0 if s.clip_grad is None else min(1.0, s.clip_grad / (norm + 1e-6))
        lr = s.lr * s.schedule(self.steps)
        self.steps += 1
        corrections = 1 - s.betas[0] ** self.steps, 1 - s.betas[1] ** self.steps
        for name, p in parameters.items():
            gradient = p.grad * scale
            first, second = self.moments.get(name, (torch.zeros_like(p), torch.zeros_like(p)))
            first = s.betas[0] * first + (1 - s.betas[0]) * gradient
            second = s.betas[1] * second + (1 - s.betas[1]) * gradient**2
            self.moments[name] = first, second
            if p.ndim > 1 and not name.endswith("_bias"):  # of experts
                p -= lr * s.weight_decay * p
            if s.tensorflow:
                p -= lr * math.sqrt(corrections[1]) / corrections[0] * first / (second.sqrt() + s.eps)
            else:
                p -= lr * (first / corrections[0]) / ((second / corrections[1]).sqrt() + s.eps)
        return norm


def averaged(average: dict[str, Tensor], model: nn.Module, decay: float) -> dict[str, Tensor]:
    """The moving average of a model's parameters after one more of its steps."""
    return {name: decay * average[name] + (1 - decay) * p.detach() for name, p in model.named_parameters()}
