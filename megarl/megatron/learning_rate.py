"""The learning rate of each optimizer step: warm-up, then a course."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megarl.algos.optimisation import linear_anneal
from megarl.config.schema import Optimizer


@dataclass(frozen=True, kw_only=True)
class Course:
    """How long the learning rate takes.

    Args:
        total: optimizer steps of the whole run.
        together: optimizer steps of one step of the run, which have one rate where the schedule is ``anneal``; they
            divide ``total``.
    """

    total: int
    together: int = 1


def learning_rate(settings: Optimizer, step: int, course: Course) -> float:
    """The learning rate of an optimizer step.

    With W warm-up steps of N, step k < W has lr * (k + 1) / (W + 1); step W has lr, and from there

        linear:  final_lr + (lr - final_lr) * (1 - p),      p = (k - W) / (N - W)
        cosine:  final_lr + (lr - final_lr) * (1 + cos(pi * p)) / 2
        anneal:  lr * (1 - s / S),                          in step s, from 0 on, of the S steps of the run

    No step has the rate 0, which would be for nothing: the rise starts from 0 a step before the first, and the end of
    the course is reached after the last.

    Args:
        settings: of the role.
        step: optimizer steps taken before this one.
        course: of the whole run; later steps, if any, have the last rate.
    """
    warmup = min(math.ceil(settings.warmup * course.total), course.total - 1)
    if step < warmup:
        return settings.lr * (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / (course.total - warmup))
    match settings.schedule:
        case "constant":
            return settings.lr
        case "anneal":
            last = min(step, course.total - 1)
            return linear_anneal(settings.lr, last // course.together, course.total // course.together)
        case "linear":
            height = 1.0 - progress
        case "cosine":
            height = (1.0 + math.cos(math.pi * progress)) / 2.0
    return settings.final_lr + (settings.lr - settings.final_lr) * height
