"""M2PO: the tokens that keep the second moment of the log-ratios small, found over all ranks without gathering them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megarl.algos.normalization import Reduce

DIGIT_BITS = 8
BUCKETS = 2**DIGIT_BITS


def m2po(
    old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor, reduce: Reduce, *, threshold: float = 0.04
) -> Tensor:
    """Drops the tokens of the step that moved most until the mean of the squared log-ratios is below the threshold.

    With x = (rollout - old)^2, kept are the smallest x whose mean is below ``threshold``: as many as there can be, and
    at least the smallest. Tokens of one x stay or go together, so that nothing depends on their order or on the ranks.
    Source: Zheng et al., "Prosperity before collapse: how far can off-policy RL reach with stale data on LLMs?" (2025),
    as in AReaL.

    Args:
        old_logprobs: [B, R] nats, by the trainer before the update.
        rollout_logprobs: [B, R] nats, by the engine that sampled.
        response_mask: [B, R] bool.
        reduce: called as often on every rank, with tokens or without; eight times at most.
        threshold: of the mean, nats^2.

    Returns:
        [B, R] bool, False off the mask.
    """
    squares = (rollout_logprobs.double() - old_logprobs.double()).square()
    first_out, none_smaller = _first_out(squares[response_mask], reduce, threshold)
    return response_mask & (squares <= first_out if none_smaller else squares < first_out)


def _first_out(values: Tensor, reduce: Reduce, threshold: float) -> tuple[float, bool]:
    """The smallest value with which the mean of the smallest reaches the threshold, and whether it is the smallest.

    The mean of the n smallest grows with n, so that there is one such value, or none: infinity. It is searched digit by
    digit, as bits of numbers that are not negative are in the order of the numbers: a round adds up the values that
    agree with the digits known so far, by their next one.
    """
    bits = values.view(torch.int64)
    known, smaller = 0, values.new_zeros(2)
    for shift in range(64 - DIGIT_BITS, -1, -DIGIT_BITS):
        matching = (bits >> DIGIT_BITS >> shift) == known
        digits = (bits[matching] >> shift) & (BUCKETS - 1)
        counts = torch.bincount(digits, minlength=BUCKETS).double()
        sums = torch.bincount(digits, weights=values[matching], minlength=BUCKETS)
        buckets = reduce(torch.cat([counts, sums])).view(2, BUCKETS)
        numbers, totals = smaller[:, None] + buckets.cumsum(1)
        occupied = buckets[0] > 0
        reached = occupied & (totals >= threshold * numbers)
        if reached.any():
            first = int(reached.nonzero()[0])
        elif shift == 64 - DIGIT_BITS:
            return math.inf, False
        else:
            first = int(occupied.nonzero()[-1])  # its coarser bucket reached the threshold: this is rounding
        smaller = smaller + buckets[:, :first].sum(1)
        known = known << DIGIT_BITS | first
    return float(torch.tensor(known).view(torch.float64)), not bool(smaller[0])
