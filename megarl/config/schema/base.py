"""The base class of sections, and types of their values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

_DEVICES = re.compile(r"(\d+)(?:-(\d+))?")


class Section(BaseModel):
    """A part of a configuration: frozen, without unknown keys, and without coercion of values."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def parse_devices(text: str) -> tuple[int, ...]:
    """Parses a list of devices such as ``0-3`` or ``0,1,4-5``, in its order; numbers count over all nodes from 0.

    Raises:
        ValueError: a part that is neither a number nor a rising range, or a device named twice.
    """
    devices: list[int] = []
    for part in text.split(","):
        match = _DEVICES.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part.strip()!r} is neither a device number nor a range such as 0-3")
        first = int(match[1])
        last = int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the range {part.strip()} runs backwards")
        devices.extend(range(first, last + 1))
    if len(set(devices)) < len(devices):
        raise ValueError(f"{text!r} names a device twice")
    return tuple(devices)


def _device_text(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value


def _checked_devices(text: str) -> str:
    parse_devices(text)
    return text


def raw_section(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns a section of a plain configuration that need not be valid; empty if there is none."""
    section = raw.get(name)
    if isinstance(section, Mapping):
        return cast(Mapping[str, Any], section)
    return {}


def without_removed(value: object) -> object:
    """Drops the entries that an override set to null."""
    if not isinstance(value, Mapping):
        return value
    return {key: entry for key, entry in cast(Mapping[object, object], value).items() if entry is not None}


Devices = Annotated[str, BeforeValidator(_device_text), AfterValidator(_checked_devices)]
GroupName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")]


def _around_zero(value: object) -> object:
    """A number alone is the limit on both sides."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (-value, value)
    return value


def _rising(interval: tuple[float, float]) -> tuple[float, float]:
    if interval[0] >= interval[1]:
        raise ValueError("should rise: a number above 0, or [lower, upper]")
    return interval


Interval = Annotated[tuple[float, float], BeforeValidator(_around_zero), AfterValidator(_rising), Field(strict=False)]
