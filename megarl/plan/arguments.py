"""The arguments of ``megarl plan weights``: layouts and link speeds as ``key=value`` lists."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.models import ModelSpec, model_spec
from megarl.types import Layout
from megarl.weights.hf_files import read_config
from megarl.weights.topology import Distance, Place

LINKS = {"device": Distance.DEVICE, "node": Distance.NODE, "network": Distance.NETWORK}
_SPEEDS = {"device": 2000.0, "node": 400.0, "network": 50.0}
"""GB/s of one rank, each way: copies in a GPU's memory, NVLink 4, a 400 Gbit/s network card per GPU."""


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
        devices = range(max(trainers, first + engines))
        places = [Place(node=device // self.devices_per_node, device=device) for device in devices]
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
    """Parses the arguments of ``megarl plan weights``; raises ValueError or OSError at a mistake."""
    sizes: dict[str, Any] = _parse_pairs("--train", train, ("tp", "pp", "dp", "vpp", "ep"), int)
    layout = Layout(**sizes)
    engines = {"tp": 1, "replicas": 1, **_parse_pairs("--rollout", rollout, ("tp", "replicas"), int)}
    speeds = {**_SPEEDS, **_parse_pairs("--link", link, tuple(LINKS), float)}
    spec = model_spec(read_config(hf))
    spec.check_megatron(layout)
    spec.check_vllm(engines["tp"])
    ranks = engines["tp"] * engines["replicas"]
    if colocated and ranks > layout.world_size:
        raise ValueError(f"--colocated: the engines' {ranks} ranks exceed the trainer's {layout.world_size} devices")
    return WeightPlanRequest(
        spec=spec,
        layout=layout,
        **engines,
        devices_per_node=devices_per_node,
        colocated=colocated,
        bucket_bytes=int(bucket_mib * 2**20),
        speeds={LINKS[name]: speed * 1e9 for name, speed in speeds.items()},
    )


def _parse_pairs[T: (int, float)](
    option: str, text: str, keys: Sequence[str], parse: Callable[[str], T]
) -> dict[str, T]:
    """Parses ``key=value,key=value`` of numbers above 0."""
    values: dict[str, T] = {}
    for entry in filter(None, text.split(",")):
        key, _, given = map(str.strip, entry.partition("="))
        if key not in keys or key in values:
            raise ValueError(f"{option}: {key!r} is not one of {', '.join(keys)}, each given once")
        try:
            value = parse(given)
        except ValueError:
            raise ValueError(f"{option}: {key} must be a number above 0, not {given!r}") from None
        if not 0 < value < math.inf:
            raise ValueError(f"{option}: {key} must be a number above 0, not {given!r}")
        values[key] = value
    return values
