"""The selection of samples to train on: filters of prompts, and the best samples for rejection fine-tuning.

A filter is a function of (scores), with options by keyword, that is called once for each prompt:

    scores: [n] float32, total scores of the prompt's scored samples; n is at least 1.

It returns a bool, whether the prompt is kept. A prompt without a scored sample is not kept.

A selection of rejection fine-tuning is a function of (scores, groups, discarded), which returns the
indices of the selected samples, [K] int64:

    scores: [N], of the samples of all ranks.
    groups: [N] int64, the number of each sample's prompt.
    discarded: [N] bool, samples that may not be chosen.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megarl.bounds import BelowOne, NotNegative


def best_of_groups(scores: Tensor, groups: Tensor, discarded: Tensor) -> Tensor:
    """The best sample of each prompt, the first of equals, in the order of the prompts' numbers.

    A prompt whose samples are all discarded has none. Source: RAFT (Dong et al., 2023) as LMFlow's
    "local" selection.
    """
    candidates = scores.masked_fill(discarded, -math.inf)
    best: list[int] = []
    for group in sorted({int(group) for group in groups}):
        members = (groups == group).nonzero().squeeze(-1)
        index = int(members[candidates[members].argmax()])
        if not discarded[index]:
            best.append(index)
    return torch.tensor(best, dtype=torch.int64)


def best_fraction(scores: Tensor, groups: Tensor, discarded: Tensor, *, fraction: BelowOne = 0.2) -> Tensor:
    """The best floor(fraction * N) of all samples that are not discarded, best first; of equals the later one first.

    Source: RAFT (Dong et al., 2023) as LMFlow's "top" selection.

    Args:
        fraction: part of the samples that is kept.
    """
    order = scores.masked_fill(discarded, -math.inf).argsort(stable=True).flip(0)
    allowed = order[~discarded[order]]
    return allowed[: int(len(scores) * fraction)]


def nonzero_std(scores: Tensor, *, tol: NotNegative = 0.0) -> bool:
    """Whether the population deviation of the scores of a prompt's samples is above ``tol``.

    With tol 0, exactly whether they differ. Source: DAPO's dynamic sampling (Yu et al., 2025), as
    in verl and slime.

    Args:
        tol: the largest deviation that is too small.
    """
    return bool(scores.max() > scores.min()) and float(scores.double().std(correction=0)) > tol


def open_range(scores: Tensor, *, low: float = 0.0, high: float = 1.0) -> bool:
    """Whether a prompt is neither too hard nor too easy: low < mean < high.

    In the precision of the scores. Source: OpenRLHF's dynamic filtering.

    Args:
        low: lower bound.
        high: upper bound.
    """
    bounds = scores.new_tensor([low, high])
    mean = scores.double().mean().to(scores.dtype)
    return bool(bounds[0] < mean) and bool(mean < bounds[1])
