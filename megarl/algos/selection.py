"""Which samples are trained on: those of prompts that pass a filter, and the best for rejection fine-tuning.

A filter is a function of (scores), with options by keyword, that is called once for each prompt:

    scores: [n] float32, as the algorithm takes them, of the prompt's samples that have a score; n is at least 1.

It returns a bool, whether the prompt is kept. A prompt without a scored sample is not kept.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def best_of_groups(scores: Tensor, groups: Tensor, discarded: Tensor) -> Tensor:
    """The best sample of each prompt, the first of equals; a prompt whose samples are all discarded has none.

    Source: RAFT (Dong et al., 2023) as LMFlow's "local" selection.

    Args:
        scores: [N].
        groups: [N] int64, the number of each sample's prompt.
        discarded: [N] bool, samples that may not be chosen.

    Returns:
        Indices of samples, int64, in the order of the prompts' numbers.
    """
    candidates = scores.masked_fill(discarded, -math.inf)
    best = [_first_best(candidates, groups == group) for group in sorted({int(group) for group in groups})]
    return torch.tensor([index for index in best if not discarded[index]], dtype=torch.int64)


def best_fraction(scores: Tensor, discarded: Tensor, *, fraction: float = 0.2) -> Tensor:
    """The best of all samples together, best first; of equals the later one first.

    floor(fraction * N) samples, or as many as are not discarded. Source: RAFT (Dong et al., 2023) as LMFlow's "top"
    selection.

    Args:
        scores: [N], of the samples of all ranks.
        discarded: [N] bool, samples that may not be chosen.
        fraction: of the samples.

    Returns:
        Indices of samples, int64.
    """
    order = scores.masked_fill(discarded, -math.inf).argsort(stable=True).flip(0)
    allowed = order[~discarded[order]]
    return allowed[: int(len(scores) * fraction)]


def nonzero_std(scores: Tensor, *, tol: float = 0.0) -> bool:
    """Whether the scores of a prompt's samples differ.

    The population deviation is above ``tol``; with tol 0, the largest score is above the smallest, without any
    rounding. Source: DAPO's dynamic sampling (Yu et al., 2025), as in verl and slime.

    Args:
        scores: [n], of the samples of one prompt.
        tol: smallest deviation that does not count as one.
    """
    return bool(scores.max() > scores.min()) and float(scores.double().std(correction=0)) > tol


def open_range(scores: Tensor, *, low: float = 0.0, high: float = 1.0) -> bool:
    """Whether a prompt is neither too hard nor too easy.

    low < mean < high, in the precision of the scores. Source: OpenRLHF's dynamic filtering.

    Args:
        scores: [n], of the samples of one prompt.
        low: mean that is too low.
        high: mean that is too high.
    """
    bounds, mean = scores.new_tensor([low, high]), scores.double().mean().to(scores.dtype)
    return bool(bounds[0] < mean) and bool(mean < bounds[1])


def _first_best(scores: Tensor, members: Tensor) -> int:
    own = members.nonzero().squeeze(-1)
    return int(own[int((scores[own] == scores[own].max()).nonzero()[0])])
