"""What a response that comes near the length limit loses; without torch, for the processes that score."""

from __future__ import annotations


def overlong_penalty(
    tokens: int, *, max_tokens: int, buffer_tokens: int, factor: float = 1.0, capped: bool = True
) -> float:
    """min(0, -factor * e / buffer_tokens) with e = tokens - (max_tokens - buffer_tokens), at most buffer_tokens.

    The soft overlong punishment, which is added to the score: 0, then a line down to -factor at ``max_tokens``. Without
    the cap it goes on falling beyond, where a response may be that long. Source: DAPO (Yu et al., 2025) and OpenRLHF
    (capped), verl and AReaL (not capped).

    Args:
        tokens: of the response, its end token included.
        max_tokens: where the penalty is full.
        buffer_tokens: over which it rises.
        factor: of the full penalty.
        capped: whether it stays full beyond.
    """
    exceeding = tokens - (max_tokens - buffer_tokens)
    if capped:
        exceeding = min(exceeding, buffer_tokens)
    return min(0.0, -factor * exceeding / buffer_tokens)
