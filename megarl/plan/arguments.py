"""Layouts and link speeds given to ``megarl plan weights`` as ``key=value`` lists."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from megarl.config import Problem
from megarl.types import Layout
from megarl.weights.topology import Distance

T = TypeVar("T")

_DEGREES = ("tp", "pp", "dp", "vpp", "ep")
LINKS: Mapping[str, Distance] = {"device": Distance.DEVICE, "node": Distance.NODE, "network": Distance.NETWORK}
GIGA = 1e9
DEFAULT_SPEEDS: Mapping[Distance, float] = {
    Distance.DEVICE: 2000 * GIGA,
    Distance.NODE: 400 * GIGA,
    Distance.NETWORK: 50 * GIGA,
}
"""Bytes per second of one rank, each way: copies in a GPU's memory, NVLink 4, a 400 Gbit/s network card per GPU."""


@dataclass(frozen=True, kw_only=True)
class EngineLayout:
    """Engines of ``tp`` ranks each."""

    tp: int
    replicas: int


def train_layout(text: str, problems: list[Problem]) -> Layout | None:
    """Parses the trainer's layout; None, with its problems added, where it is invalid."""
    values = _counts("--train", text, _DEGREES, problems)
    if values is None:
        return None
    try:
        tp, pp, dp, vpp, ep = (values.get(key, 1) for key in _DEGREES)
        return Layout(tp=tp, pp=pp, dp=dp, vpp=vpp, ep=ep)
    except ValueError as error:
        problems.append(Problem(field="--train", value=text, rule=str(error), fix="choose an ep that divides dp"))
        return None


def rollout_layout(text: str, problems: list[Problem]) -> EngineLayout | None:
    """Parses the engines' layout; None, with its problems added, where it is invalid."""
    values = _counts("--rollout", text, ("tp", "replicas"), problems)
    return None if values is None else EngineLayout(tp=values.get("tp", 1), replicas=values.get("replicas", 1))


def link_speeds(text: str, problems: list[Problem]) -> dict[Distance, float]:
    """Parses bytes per second by distance, with defaults for the rest."""
    given = _pairs("--link", text, tuple(LINKS), "a number above 0 (GB/s)", _speed, problems) or {}
    return dict(DEFAULT_SPEEDS) | {LINKS[name]: speed * GIGA for name, speed in given.items()}


def _counts(option: str, text: str, keys: tuple[str, ...], problems: list[Problem]) -> dict[str, int] | None:
    return _pairs(option, text, keys, "a whole number, 1 or more", _count, problems)


def _pairs(
    option: str, text: str, keys: tuple[str, ...], what: str, read: Callable[[str], T], problems: list[Problem]
) -> dict[str, T] | None:
    """Parses ``key=value,key=value``; None, with the problems added, where something is wrong."""
    values: dict[str, T] = {}
    rules: list[str] = []
    for entry in filter(None, text.split(",")):
        key, _, value = (part.strip() for part in entry.partition("="))
        if key not in keys:
            rules.append(f"{key!r} is not one of {', '.join(keys)}")
        elif key in values:
            rules.append(f"{key} is given twice")
        else:
            try:
                values[key] = read(value)
            except ValueError:
                rules.append(f"{key} must be {what}, not {value!r}")
    if rules:
        example = ",".join(f"{key}=..." for key in keys)
        problems.append(Problem(field=option, value=text, rule="; ".join(rules), fix=f"write {example}; any subset"))
        return None
    return values


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError
    return int(text)


def _speed(text: str) -> float:
    speed = float(text)
    if not 0 < speed < math.inf:
        raise ValueError
    return speed
