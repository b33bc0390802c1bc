"""Types of settings and of algorithms' options: numbers within bounds, and names. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

Temperature = Annotated[float, Field(ge=0.01, le=2)]  # vLLM (0.32) raises lower ones to 0.01, and refuses higher ones
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
BelowHalf = Annotated[float, Field(ge=0, lt=0.5)]
BelowOne = Annotated[float, Field(gt=0, lt=1)]
AboveOne = Annotated[float, Field(gt=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
RatioBounds = Annotated[tuple[NotNegative, Positive], Field(strict=False)]  # YAML has lists, and no tuples

DivergenceForm = Literal["reverse", "forward", "jsd"]
RejectionStatistic = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "sequence_sum_k1",
    "sequence_sum_k2",
    "sequence_sum_k3",
    "sequence_mean_k1",
    "sequence_mean_k2",
    "sequence_mean_k3",
    "sequence_max_k2",
    "sequence_max_k3",
]
