"""Optimizer steps: their rate, Adam's epsilon, their mini-batches, their seeds, and when to stop."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

RANK_STRIDE = 100003


def linear_anneal(lr: float, index: int, total: int) -> float:
    """lr * (1 - index / total): the learning rate, constant within a step of the run, 0 after the last.

    Source: Ziegler et al., "Fine-tuning language models from human preferences" (2019).

    Args:
        lr: at the start.
        index: steps (rollouts) that are done; of a reward model, labels that were seen.
        total: of the run.
    """
    return lr * (1 - index / total)


def tensorflow_eps(eps: float, beta2: float, step: int) -> float:
    """The epsilon with which PyTorch's Adam takes the step that TensorFlow's takes with ``eps``.

    eps / sqrt(1 - beta2^step). TensorFlow adds eps to sqrt(v), PyTorch to sqrt(v / (1 - beta2^step)): with the same
    epsilon, its first steps are larger where gradients are small. Source: Huang et al., "The N implementation details
    of RLHF with PPO" (2023).

    Args:
        eps: TensorFlow's.
        beta2: decay of the second moment.
        step: of this optimizer, from 1 on.
    """
    return eps / math.sqrt(1 - beta2**step)


def divided(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """The items in order in so many parts, whose sizes differ by one at most.

    An epoch in mini-batches, of an optimizer step each, and a mini-batch in micro-batches: no sample is left over to
    make a smaller last one, which would weigh more. Source: the loops of lm-human-preferences, whose batches are
    multiples of their parts.

    Args:
        items: in the order of the epoch's permutation.
        parts: at least 1.
    """
    bounds = [len(items) * part // parts for part in range(parts + 1)]
    return [items[start:stop] for start, stop in itertools.pairwise(bounds)]


def exceeds_target(kl: float, *, target: float, factor: float = 1.5) -> bool:
    """Whether an epoch moved the policy so far that there should be no other on these samples: kl > factor * target.

    Source: TRL 0.10's early stopping.

    Args:
        kl: the epoch's mean of old - new over tokens, over all ranks, nats (``ppo_kl``).
        target: nats.
        factor: by which the target may be exceeded.
    """
    return kl > factor * target


def rank_seeds(seed: int, ranks: Sequence[int], *, stride: int = RANK_STRIDE) -> list[int]:
    """seed + rank * stride, for each data-parallel rank.

    For comparison with lm-human-preferences, which seeds its ranks so. Nothing random here depends on the layout: a
    sample's seed is a hash of the run's, the step, the prompt and the sample's index.

    Args:
        seed: of the run.
        ranks: data-parallel ranks.
        stride: between neighbours.
    """
    return [seed + rank * stride for rank in ranks]
