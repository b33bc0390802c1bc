"""Optimizer steps: learning rate, Adam's epsilon, mini-batches, early stopping, and mixtures of losses and weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor


def linear_anneal(lr: float, index: int, total: int) -> float:
    """lr * (1 - index / total), after ``index`` steps of the run, or labels of a reward model; constant within a step.

    Source: Ziegler et al., "Fine-tuning language models from human preferences" (2019).
    """
    return lr * (1 - index / total)


def tensorflow_eps(eps: float, beta2: float, step: int) -> float:
    """eps / sqrt(1 - beta2^step): the epsilon with which PyTorch's Adam steps as TensorFlow's does with ``eps``.

    TensorFlow adds eps to sqrt(v), PyTorch to sqrt(v / (1 - beta2^step)): with the same epsilon,
    its first steps are larger where gradients are small. ``step`` counts from 1. Source: Huang et
    al., "The N implementation details of RLHF with PPO" (2023).
    """
    return eps / math.sqrt(1 - beta2**step)


def divided[T](items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """The items in order, in parts whose sizes differ by one at most.

    Splits an epoch into mini-batches, of an optimizer step each: no smaller last one is left, whose
    samples would weigh more. Source: the loops of lm-human-preferences, whose batches are multiples
    of their parts.
    """
    bounds = [len(items) * part // parts for part in range(parts + 1)]
    return [items[start:stop] for start, stop in itertools.pairwise(bounds)]


def exceeds_target(kl: float, *, target: float, factor: float = 1.5) -> bool:
    """Whether an epoch moved the policy too far for another on the same samples: kl > factor * target.

    kl is the epoch's mean of old - new over the tokens of all ranks, nats.
    Source: TRL 0.10's early stopping.
    """
    return kl > factor * target


def ptx_shares(*, coef: float, mode: Literal["add", "convex", "deepspeed"] = "add") -> tuple[float, float]:
    """The factors of the policy loss L and of the loss of pretraining texts L_ptx, whose weighted sum is the loss.

    add: L + c * L_ptx; convex: (1 - c) * L + c * L_ptx; deepspeed: (L + c * L_ptx) / 2. L_ptx is
    the mean negative log-likelihood per token of the texts in an optimizer step, with a denominator
    of its own. Source: Ouyang et al., "Training language models to follow instructions with human
    feedback" (2022), with c = 27.8; ColossalChat (convex); DeepSpeed-Chat, which divides each half
    of a doubled accumulation window by the whole.
    """
    match mode:
        case "add":
            return 1.0, coef
        case "convex":
            return 1.0 - coef, coef
        case "deepspeed":
            return 0.5, coef / 2


def ema(average: Tensor, current: Tensor, *, decay: float) -> Tensor:
    """decay * average + (1 - decay) * current: the next value of an exponential moving average of weights.

    The actor's starts as a copy and moves once per optimizer step; with decay = 1 - w it is the
    soft update of the reference, w * actor + (1 - w) * reference. Source: OpenRLHF and
    DeepSpeed-Chat (.992); TRL's ``ref_model_mixup_alpha``.

    Raises:
        TypeError: ``average`` is not float32 or float64: bfloat16 loses the steps of
            a slow average in rounding.
    """
    if average.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"an average of {average.dtype} does not move: keep it in float32")
    return torch.lerp(current.to(average.dtype), average, decay)
