"""Rules of the runs in these tests."""

from __future__ import annotations

from megarl.rewards.functions import Answer


def remainder(answer: Answer, divisor: int, shift: float = 0.0) -> float:
    """The sum of the response's ids modulo a number, plus a shift: any two responses may differ, or be alike."""
    return sum(answer.response_ids) % divisor + shift
