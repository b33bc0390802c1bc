"""The plan of a weight transfer from trainers to engines, made without weights or devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from megarl.files import format_bytes
from megarl.garbage_collection import collector_paused
from megarl.models import ModelSpec, model_spec
from megarl.resharding.spec import engine_holders, trainer_holders
from megarl.types import Layout
from megarl.weights.hf_files import read_config
from megarl.weights.plan import TransferPlan
from megarl.weights.planner import Distance, Holder, Place, plan
from megarl.weights.shard_map import ITEM_BYTES, ShardMap

Ints = npt.NDArray[np.int64]
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


@dataclass(frozen=True, kw_only=True)
class LinkTraffic:
    """The traffic over one kind of link.

    Args:
        sent, received: bytes of the ranks that send and receive the most over it.
        bytes_per_second: speed each way.
        seconds: time of the rank that needs it longest.
    """

    messages: int
    nbytes: int
    sent: int
    received: int
    bytes_per_second: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class WeightsReport:
    """The size and the estimated duration of a transfer.

    Args:
        parameters, model_bytes: number and size of all canonical tensors' elements.
        nbytes: payload of all messages.
        needed_bytes: size of every element of every engine rank's shard, without padding.
        redundancy: ``nbytes / needed_bytes``.
        sent, received: median and maximum of the bytes per trainer rank, and per engine rank; idle
            ranks count as 0.
        bucket_bytes: size of the largest bucket.
        staging_bytes: size of two such buckets, which each rank has.
        plan_seconds: time of planning, shard maps included.
        links: traffic by distance.
        slowest_rank_seconds, in_step_seconds: see ``_Traffic.seconds``.
    """

    model: str
    parameters: int
    model_bytes: int
    trainer_ranks: int
    engine_ranks: int
    nbytes: int
    needed_bytes: int
    redundancy: float
    sent: Mapping[str, int]
    received: Mapping[str, int]
    messages: int
    bucket_bytes: int
    staging_bytes: int
    plan_seconds: float
    links: Mapping[str, LinkTraffic]
    slowest_rank_seconds: float
    in_step_seconds: float


class _Traffic:
    """The M messages of a plan between R ranks, which are numbered from 0 in their order.

    Attributes:
        sent, received: [R] bytes of each rank, by distance.
        counts: number of messages, by distance.
    """

    def __init__(self, plan: TransferPlan, sources: Iterable[Holder], destinations: Iterable[Holder]) -> None:
        source_of = {holder.rank: holder for holder in sources}
        destination_of = {holder.rank: holder for holder in destinations}
        rows: list[tuple[int, int, int, int]] = []
        for part in plan.senders.values():
            for message in part.messages:
                rows.append((message.sender, message.receiver, message.bucket, message.nbytes))
        columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        ranks, numbers = np.unique(columns[:2], return_inverse=True)
        self._ranks = len(ranks)
        self._sender, self._receiver = numbers.reshape(2, -1)
        self._bucket = columns[2]  # of the receiver
        self._nbytes = columns[3]
        pairs, pair = np.unique(self._sender * self._ranks + self._receiver, return_inverse=True)
        distances: list[int] = []
        for number in pairs.tolist():
            sender, receiver = divmod(number, self._ranks)
            source = source_of[int(ranks[sender])]
            distances.append(source.distance(destination_of[int(ranks[receiver])]))
        self._distance = np.array(distances, dtype=np.int64)[pair]
        self.counts = np.bincount(self._distance, minlength=len(Distance)).tolist()
        self.sent = {distance: self._bytes(self._sender, distance, self._ranks) for distance in Distance}
        self.received = {distance: self._bytes(self._receiver, distance, self._ranks) for distance in Distance}

    def seconds(self, speeds: Mapping[Distance, float]) -> tuple[float, float]:
        """Estimates the duration as (of the slowest rank alone, of all ranks in step).

        In step, all ranks begin every bucket together: the sum over buckets of each one's slowest
        rank. A transfer with two buckets under way lies between the two. Ranks send and receive at
        the same time, at the link's speed in each direction, and use one link after the other;
        packing, loading and congestion are ignored. ``speeds`` are bytes per second
        of a rank's links.
        """
        count = self._ranks
        buckets = int(self._bucket.max(initial=-1)) + 1
        alone = np.zeros(count)
        together = np.zeros(buckets * count)
        for distance, speed in speeds.items():
            alone += np.maximum(self.sent[distance], self.received[distance]) / speed
            sent = self._bytes(self._bucket * count + self._sender, distance, buckets * count)
            received = self._bytes(self._bucket * count + self._receiver, distance, buckets * count)
            together += np.maximum(sent, received) / speed
        slowest = together.reshape(buckets, count).max(axis=1, initial=0.0)
        return float(alone.max(initial=0.0)), float(slowest.sum())

    def _bytes(self, index: Ints, distance: Distance, count: int) -> Ints:
        """Returns the bytes at this distance by index of their messages, [count]."""
        chosen = self._distance == distance
        # Sums in float64, exact below 2**53 bytes.
        return np.bincount(index[chosen], weights=self._nbytes[chosen], minlength=count).astype(np.int64)


@collector_paused()
def plan_weights(request: WeightPlanRequest) -> WeightsReport:
    start = perf_counter()
    spec = request.spec
    trainers, engines = request.places()
    sources = trainer_holders(spec, request.layout, trainers)
    destinations = engine_holders(spec, request.tp, engines, first=len(sources))
    transfer = plan(sources, destinations, request.bucket_bytes)
    plan_seconds = perf_counter() - start
    traffic = _Traffic(transfer, sources, destinations)
    needed = request.replicas * sum(_content_bytes(holder.map) for holder in destinations[: request.tp])
    sent = [0] * len(sources)
    for rank, part in transfer.senders.items():
        sent[rank] = part.nbytes
    tensors = spec.canonical()
    slowest, in_step = traffic.seconds(request.speeds)
    return WeightsReport(
        model=spec.family.model_type,
        parameters=sum(math.prod(info.shape) for info in tensors.values()),
        model_bytes=sum(info.nbytes for info in tensors.values()),
        trainer_ranks=len(sources),
        engine_ranks=len(destinations),
        nbytes=transfer.nbytes,
        needed_bytes=needed,
        redundancy=transfer.nbytes / needed,
        sent=_spread(sent),
        received=_spread([part.nbytes for part in transfer.receivers.values()]),
        messages=transfer.num_messages,
        bucket_bytes=transfer.staging_bytes,
        staging_bytes=2 * transfer.staging_bytes,
        plan_seconds=plan_seconds,
        links={name: _link(traffic, distance, request.speeds[distance]) for name, distance in LINKS.items()},
        slowest_rank_seconds=slowest,
        in_step_seconds=in_step,
    )


def _content_bytes(shard_map: ShardMap) -> int:
    """Returns the bytes of a map's parameters without padding."""
    nbytes = shard_map.nbytes
    for param, box in shard_map.padding:
        nbytes -= box.size * ITEM_BYTES[shard_map.params[param].dtype]
    return nbytes


def _spread(nbytes: Sequence[int]) -> dict[str, int]:
    return {"median": int(np.median(nbytes)), "maximum": max(nbytes)}


def _link(traffic: _Traffic, distance: Distance, speed: float) -> LinkTraffic:
    sent = traffic.sent[distance]
    received = traffic.received[distance]
    return LinkTraffic(
        messages=traffic.counts[distance],
        nbytes=int(sent.sum()),
        sent=int(sent.max()),
        received=int(received.max()),
        bytes_per_second=speed,
        seconds=float(np.maximum(sent, received).max()) / speed,
    )


_FAR = {"device": "same device", "node": "same node", "network": "other nodes"}
_ESTIMATE = "from the slowest rank alone to all ranks in step; packing, loading and congestion come on top"


def print_weights(report: WeightsReport) -> None:
    lines = {
        "model": f"{report.model}, {report.parameters:,} parameters, {format_bytes(report.model_bytes)}",
        "ranks": f"{report.trainer_ranks} of the trainer, {report.engine_ranks} of engines",
        "bytes": f"{format_bytes(report.nbytes)} in {report.messages} messages",
        "redundancy": f"{report.redundancy:.4f} of {format_bytes(report.needed_bytes)} in the engines' shards",
        "sent": f"per trainer rank, {_spread_text(report.sent)}",
        "received": f"per engine rank, {_spread_text(report.received)}",
        "staging": f"{format_bytes(report.staging_bytes)} per rank, two of the largest bucket",
        "planned in": f"{report.plan_seconds:.2f} s",
        "estimate": f"{report.slowest_rank_seconds:.3f} s to {report.in_step_seconds:.3f} s, {_ESTIMATE}",
    }
    out = Console(highlight=False)
    for key, text in lines.items():
        out.print(f"{key:14}{text}", soft_wrap=True, markup=False)
    table = Table("distance", "messages", "bytes", "most sent", "most received", "GB/s", "seconds", box=None)
    for name, link in report.links.items():
        sizes = map(format_bytes, (link.nbytes, link.sent, link.received))
        table.add_row(_FAR[name], str(link.messages), *sizes, f"{link.bytes_per_second / 1e9:g}", f"{link.seconds:.3f}")
    out.print(table)


def _spread_text(spread: Mapping[str, int]) -> str:
    return f"median {format_bytes(spread['median'])}, maximum {format_bytes(spread['maximum'])}"
