"""Types of bounded numbers, for settings and options of algorithms."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(gt=0, lt=1)]
AboveOne = Annotated[float, Field(gt=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
RatioBounds = Annotated[tuple[NotNegative, Positive], Field(strict=False)]  # YAML has lists, and no tuples
