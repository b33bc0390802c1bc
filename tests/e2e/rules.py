"""Rules of the runs in these tests."""

from __future__ import annotations

from megarl.rewards.functions import Completion


def remainder(completion: Completion, divisor: int, shift: float = 0.0) -> float:
    """The sum of the response's ids modulo a number, plus a shift: any two responses may differ, or be alike."""
    return sum(completion.response_ids) % divisor + shift
