"""The learning rate of each optimizer step: warm-up, then a constant, linear or cosine course."""

from __future__ import annotations

import math

from megarl.config.schema import Optimizer


def learning_rate(settings: Optimizer, step: int, total_steps: int) -> float:
    """The learning rate of an optimizer step.

    With W warm-up steps of N, step k < W has lr * (k + 1) / (W + 1); step W has lr, and from there

        linear:  final_lr + (lr - final_lr) * (1 - p),      p = (k - W) / (N - W)
        cosine:  final_lr + (lr - final_lr) * (1 + cos(pi * p)) / 2

    No step has the rate 0, which would be for nothing: the rise starts from 0 a step before the first, and final_lr is
    reached after the last.

    Args:
        settings: of the role.
        step: optimizer steps taken before this one.
        total_steps: of the whole run; later steps, if any, have the last rate.
    """
    warmup = min(math.ceil(settings.warmup * total_steps), total_steps - 1)
    if step < warmup:
        return settings.lr * (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / (total_steps - warmup))
    match settings.schedule:
        case "constant":
            return settings.lr
        case "linear":
            height = 1.0 - progress
        case "cosine":
            height = (1.0 + math.cos(math.pi * progress)) / 2.0
    return settings.final_lr + (settings.lr - settings.final_lr) * height
