"""The arguments of ``megarl plan weights``: layouts and link speeds as ``key=value`` lists."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megarl.config import ConfigError, Problem
from megarl.models import ModelSpec, model_spec
from megarl.types import Layout
from megarl.weights.hf_files import read_config
from megarl.weights.planner import Distance, Place
from megarl.weights.shard_map import ITEM_BYTES

LINKS = {"device": Distance.DEVICE, "node": Distance.NODE, "network": Distance.NETWORK}
_SPEEDS = {"device": 2000.0, "node": 400.0, "network": 50.0}
"""GB/s of one rank, each way: copies in a GPU's memory, NVLink 4, a 400 Gbit/s network card per GPU."""
_MIN_BUCKET_BYTES = max(ITEM_BYTES.values())


@dataclass(frozen=True, kw_only=True)
class WeightPlanRequest:
    """What to plan.

    Args:
        layout: layout of the trainer, on devices 0, 1, ...
        tp, replicas: sizes of the engines, on the next devices or the trainer's (``colocated``).
        bucket_bytes: maximum size of a message.
        speeds: bytes per second of a rank's links, each way.
    """

    spec: ModelSpec
    layout: Layout
    tp: int
    replicas: int
    devices_per_node: int
    colocated: bool
    bucket_bytes: int
    speeds: Mapping[Distance, float]

    def places(self) -> tuple[list[Place], list[Place]]:
        """Returns where the trainer's and the engines' ranks are."""
        trainers = self.layout.world_size
        engines = self.tp * self.replicas
        first = 0 if self.colocated else trainers
        places: list[Place] = []
        for device in range(max(trainers, first + engines)):
            places.append(Place(node=device // self.devices_per_node, device=device))
        return places[:trainers], places[first : first + engines]


def parse_request(
    *,
    hf: str,
    train: str,
    rollout: str,
    devices_per_node: int,
    colocated: bool,
    bucket_mib: float,
    link: str,
) -> WeightPlanRequest:
    """Parses the arguments of ``megarl plan weights``; raises ConfigError with every problem."""
    problems: list[Problem] = []

    @contextmanager
    def collected(option: str, value: str, fix: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, OSError) as error:
            problems.append(Problem(option, value, str(error), fix))

    layout = engines = spec = None
    speeds = dict(_SPEEDS)
    count = "a whole number, 1 or more"
    fix = "write tp=...,pp=...,dp=...,vpp=...,ep=...; any subset, ep a divisor of dp"
    with collected("--train", train, fix):
        sizes: dict[str, Any] = _parse_pairs(train, ("tp", "pp", "dp", "vpp", "ep"), count, _count)
        layout = Layout(**sizes)
    with collected("--rollout", rollout, "write tp=...,replicas=...; any subset"):
        engines = {"tp": 1, "replicas": 1}
        engines |= _parse_pairs(rollout, ("tp", "replicas"), count, _count)
    with collected("--link", link, "write device=...,node=...,network=...; any subset"):
        speeds |= _parse_pairs(link, tuple(LINKS), "a number above 0 (GB/s)", _positive)
    bucket_bytes = bucket_mib * 2**20
    if not _MIN_BUCKET_BYTES <= bucket_bytes < math.inf:
        rule = f"must be at least {_MIN_BUCKET_BYTES} bytes, an element of any dtype"
        problems.append(Problem("--bucket-mib", str(bucket_mib), rule, "256 is the default of a run"))
    if devices_per_node < 1:
        given = str(devices_per_node)
        problems.append(Problem("--devices-per-node", given, "must be 1 or more", "8 is the default"))
    with collected("--hf", hf, "give a supported model's directory or its config.json"):
        spec = model_spec(read_config(hf))
    if spec and layout:
        with collected("--train", train, "choose a layout that fits"):
            spec.check_megatron(layout)
    if spec and engines:
        with collected("--rollout", rollout, "choose a layout that fits"):
            spec.check_vllm(engines["tp"])
    if colocated and layout and engines:
        ranks = engines["tp"] * engines["replicas"]
        if ranks > layout.world_size:
            rule = f"its {ranks} ranks exceed the trainer's {layout.world_size} devices"
            fix = "use fewer replicas, or leave --colocated away"
            problems.append(Problem("--rollout", rollout, rule, fix))
    if problems:
        raise ConfigError(problems, "megarl plan weights")
    return WeightPlanRequest(
        spec=spec,
        layout=layout,
        **engines,
        devices_per_node=devices_per_node,
        colocated=colocated,
        bucket_bytes=int(bucket_bytes),
        speeds={LINKS[name]: speed * 1e9 for name, speed in speeds.items()},
    )


def _parse_pairs[T](text: str, keys: Sequence[str], what: str, read: Callable[[str], T | None]) -> dict[str, T]:
    """Parses ``key=value,key=value``; raises ValueError with every problem.

    ``read`` returns None for a wrong value.
    """
    values: dict[str, T] = {}
    rules: list[str] = []
    for entry in filter(None, text.split(",")):
        key, _, given = map(str.strip, entry.partition("="))
        value = read(given)
        if key not in keys:
            rules.append(f"{key!r} is not one of {', '.join(keys)}")
        elif key in values:
            rules.append(f"{key} is given twice")
        elif value is None:
            rules.append(f"{key} must be {what}, not {given!r}")
        else:
            values[key] = value
    if rules:
        raise ValueError("; ".join(rules))
    return values


def _count(text: str) -> int | None:
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _positive(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < math.inf else None
