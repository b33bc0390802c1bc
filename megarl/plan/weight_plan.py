"""The plan of a weight transfer from trainers to engines, made without weights or devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from megarl.files import format_bytes
from megarl.garbage_collection import collector_paused
from megarl.plan.arguments import LINKS, WeightPlanRequest
from megarl.resharding.holders import engine_holders, trainer_holders
from megarl.weights.plan import TransferPlan
from megarl.weights.planner import Holder, plan
from megarl.weights.shard_map import ITEM_BYTES, ShardMap
from megarl.weights.topology import Distance

Ints = npt.NDArray[np.int64]


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
        packing, loading and congestion are ignored. ``speeds`` are bytes per second of a rank's links.
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
    for padding in shard_map.padding:
        nbytes -= padding.box.size * ITEM_BYTES[shard_map.params[padding.param].dtype]
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


_KEY_WIDTH = 14
_MODEL = (
    "the slowest rank alone, to all ranks in step, where each bucket takes as long as its slowest rank. "
    "A rank sends and receives at once, at the GB/s above each way, over one kind of link after the other. "
    "Packing, loading and congestion come on top."
)
_LINK_HEADINGS = ("distance", "messages", "bytes", "most sent", "most received", "GB/s", "seconds")
_FAR = {"device": "same device", "node": "same node", "network": "other nodes"}


def print_weights(request: WeightPlanRequest, report: WeightsReport, console: Console | None = None) -> None:
    out = console or Console(highlight=False)
    for key, text in _lines(request, report):
        out.print(f"{key:{_KEY_WIDTH}}{text}", soft_wrap=True, markup=False)
    out.print()
    table = Table(*_LINK_HEADINGS, box=None)
    for name, link in report.links.items():
        table.add_row(
            _FAR[name],
            str(link.messages),
            format_bytes(link.nbytes),
            format_bytes(link.sent) if link.messages else "",
            format_bytes(link.received) if link.messages else "",
            f"{link.bytes_per_second / 1e9:g}",
            f"{link.seconds:.3f}",
        )
    out.print(table)
    out.print()
    seconds = f"{report.slowest_rank_seconds:.3f} s to {report.in_step_seconds:.3f} s"
    out.print(f"{'estimate':{_KEY_WIDTH}}{seconds}: {_MODEL}", soft_wrap=True)


def _lines(request: WeightPlanRequest, report: WeightsReport) -> list[tuple[str, str]]:
    layout = request.layout
    degrees = f"TP {layout.tp} x PP {layout.pp} x DP {layout.dp}, VPP {layout.vpp}, EP {layout.ep}"
    where = "the trainer's devices" if request.colocated else "devices of their own"
    model_bytes = f"{format_bytes(report.model_bytes)} in {request.spec.dtype}"
    per_node = f"{request.devices_per_node} devices per node"
    engines = f"{request.replicas} x TP {request.tp}"
    return [
        ("model", f"{report.model}, {report.parameters:,} parameters, {model_bytes}"),
        ("trainer", f"{report.trainer_ranks} ranks: {degrees}; {per_node}"),
        ("engines", f"{report.engine_ranks} ranks: {engines}, on {where}"),
        ("bytes", f"{format_bytes(report.nbytes)} in {report.messages} messages"),
        ("redundancy", f"{report.redundancy:.4f} of {format_bytes(report.needed_bytes)} in the engines' shards"),
        ("sent", f"per trainer rank: {_spread_text(report.sent)}"),
        ("received", f"per engine rank: {_spread_text(report.received)}"),
        ("staging", f"per rank: {format_bytes(report.staging_bytes)}, two of the largest bucket"),
        ("planned in", f"{report.plan_seconds:.2f} s"),
    ]


def _spread_text(spread: Mapping[str, int]) -> str:
    return f"median {format_bytes(spread['median'])}, maximum {format_bytes(spread['maximum'])}"
