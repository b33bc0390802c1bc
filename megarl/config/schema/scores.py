"""What becomes of a response's score before the algorithm sees it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from megarl.config.schema.base import Natural, NotNegative, Positive, Section
from megarl.config.schema.choices import Choice, Chosen


def _around_zero(value: object) -> object:
    """A number alone is the limit on both sides."""
    return (-value, value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _rising(interval: tuple[float, float]) -> tuple[float, float]:
    if interval[0] >= interval[1]:
        raise ValueError("should rise: a number above 0, or [lower, upper]")
    return interval


Interval = Annotated[tuple[float, float], BeforeValidator(_around_zero), AfterValidator(_rising), Field(strict=False)]


class ReplaceScore(Choice):
    """Its score is another one."""

    name: Literal["replace"] = "replace"
    score: float = -1.0
    """The score."""


class SubtractPenalty(Choice):
    """A penalty is taken off its score."""

    name: Literal["subtract"] = "subtract"
    penalty: Positive
    """The penalty."""


class ScaleScore(Choice):
    """Its score is multiplied."""

    name: Literal["scale"] = "scale"
    factor: NotNegative
    """The factor."""


class PlainEnd(Choice):
    """zero: its score is 0; mask: nothing is learnt from it."""

    name: Literal["zero", "mask"] = "zero"


MissingEnd = Annotated[ReplaceScore | SubtractPenalty | ScaleScore | PlainEnd, Chosen()]


class TruncateAt(Section):
    """Score a response as if it ended with the first such token; it is trained on whole."""

    token: Natural
    """Token id."""
    after: Natural = 0
    """Tokens of the response before which it does not end."""


class Scores(Section):
    """What becomes of a response's score before the algorithm sees it."""

    clip: Interval | None = None
    """Scores are clipped to [lower, upper]; a number alone is both, below and above 0. null does not clip."""
    missing_end: MissingEnd | None = None
    """What becomes of a response that the length limit ended, or with truncate_at that lacks the token."""
    truncate_at: TruncateAt | None = None
    """Score responses up to a token; null scores them whole."""
    placement: Literal["last_valid", "every_valid"] = "last_valid"
    """The tokens whose reward has the score: the last one of the response, or each."""
