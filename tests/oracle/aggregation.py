"""What each token of a response weighs in the loss of a mini-batch, from the lengths of its responses."""

from __future__ import annotations

from collections.abc import Sequence


def token_mean(own: int, lengths: Sequence[int]) -> float:
    """The mean over the tokens."""
    del own
    return 1 / sum(lengths)


def token_sum(own: int, lengths: Sequence[int]) -> float:
    """Their sum."""
    del own, lengths
    return 1.0


def sequence_mean(own: int, lengths: Sequence[int]) -> float:
    """The mean over the responses of the means of their tokens."""
    return 1 / (own * len(lengths))


def sequence_sum(own: int, lengths: Sequence[int]) -> float:
    """The mean over the responses of the sums of their tokens."""
    del own
    return 1 / len(lengths)


def sequence_sum_norm(own: int, lengths: Sequence[int], *, tokens: int) -> float:
    """The same, divided by a constant number of tokens."""
    del own
    return 1 / (len(lengths) * tokens)
