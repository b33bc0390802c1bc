"""The manners that all parts of a configuration share, and the types of its values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from megarl.config.devices import parse_devices


class Section(BaseModel):
    """A part of a configuration: frozen, unknown keys are refused, nothing is coerced."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def _device_text(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _checked_devices(text: str) -> str:
    parse_devices(text)
    return text


def without_removed(value: object) -> object:
    """Drops the entries that an override set to null."""
    if not isinstance(value, Mapping):
        return value
    return {key: entry for key, entry in cast(Mapping[object, object], value).items() if entry is not None}


Devices = Annotated[str, BeforeValidator(_device_text), AfterValidator(_checked_devices)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(gt=0, lt=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
GroupName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")]
