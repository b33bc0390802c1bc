"""Optimizer steps: rates, Adam's epsilon, mini-batches, seeds, early stopping, and mixtures of losses and weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

RANK_STRIDE = 100003


def linear_anneal(lr: float, index: int, total: int) -> float:
    """lr * (1 - index / total): the learning rate, constant within a step of the run, 0 after the last.

    Source: Ziegler et al., "Fine-tuning language models from human preferences" (2019).

    Args:
        index: steps (rollouts) that are done; of a reward model, labels that were seen.
        total: such steps or labels of the run.
    """
    return lr * (1 - index / total)


def tensorflow_eps(eps: float, beta2: float, step: int) -> float:
    """The epsilon with which PyTorch's Adam takes the step that TensorFlow's takes with ``eps``.

    eps / sqrt(1 - beta2^step). TensorFlow adds eps to sqrt(v), PyTorch to sqrt(v / (1 - beta2^step)): with the same
    epsilon, its first steps are larger where gradients are small. Source: Huang et al., "The N implementation details
    of RLHF with PPO" (2023).

    Args:
        step: of this optimizer, from 1 on.
    """
    return eps / math.sqrt(1 - beta2**step)


def divided(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """The items in order in so many parts, whose sizes differ by one at most.

    An epoch in mini-batches, of an optimizer step each, and a mini-batch in micro-batches: no sample is left over to
    make a smaller last one, which would weigh more. Source: the loops of lm-human-preferences, whose batches are
    multiples of their parts.
    """
    bounds = [len(items) * part // parts for part in range(parts + 1)]
    return [items[start:stop] for start, stop in itertools.pairwise(bounds)]


def exceeds_target(kl: float, *, target: float, factor: float = 1.5) -> bool:
    """Whether an epoch moved the policy so far that there should be no other on these samples: kl > factor * target.

    Source: TRL 0.10's early stopping.

    Args:
        kl: the epoch's mean of old - new over tokens, over all ranks, nats (``ppo_kl``); ``target`` likewise.
    """
    return kl > factor * target


def rank_seeds(seed: int, ranks: Sequence[int], *, stride: int = RANK_STRIDE) -> list[int]:
    """seed + rank * stride, for each data-parallel rank.

    For comparison with lm-human-preferences, which seeds its ranks so. Nothing random here depends on the layout: a
    sample's seed is a hash of the run's, the step, the prompt and the sample's index.
    """
    return [seed + rank * stride for rank in ranks]


def ptx_shares(*, coef: float, mode: Literal["add", "convex", "deepspeed"] = "add") -> tuple[float, float]:
    """The factors of the policy loss and of the loss of mixed-in text, before they are added up.

    add: L + c * L_ptx; convex: (1 - c) * L + c * L_ptx; deepspeed: (L + c * L_ptx) / 2. L_ptx is the mean negative
    log-likelihood per token of the text in an optimizer step, with a denominator of its own. Source: Ouyang et al.,
    "Training language models to follow instructions with human feedback" (2022), with c = 27.8; ColossalChat (convex);
    DeepSpeed-Chat, which divides each half of a doubled accumulation window by the whole.

    Returns:
        The shares of the policy and of the text.
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

    Of the actor it is taken once per optimizer step, beginning with a copy; with decay = 1 - w it is the soft
    synchronisation of the reference, w * actor + (1 - w) * reference. Source: OpenRLHF and DeepSpeed-Chat (.992); TRL's
    ``ref_model_mixup_alpha``.

    Args:
        average: float32 or float64: in bfloat16 the steps of a slow average are lost in rounding.
        current: same shape, any float type.

    Raises:
        TypeError: ``average`` has fewer bits than float32.
    """
    if average.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"an average of {average.dtype} does not move: keep it in float32")
    return torch.lerp(current.to(average.dtype), average, decay)
