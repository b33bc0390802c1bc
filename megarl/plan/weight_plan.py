"""The plan of a weight transfer from trainers to engines, made without weights or devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from rich.console import Console
from rich.table import Table

from megarl.config import ConfigError, Problem
from megarl.models import ModelSpec, model_spec
from megarl.plan.arguments import LINKS, EngineLayout, link_speeds, rollout_layout, train_layout
from megarl.plan.traffic import Traffic, content_bytes
from megarl.resharding.holders import engine_holders, trainer_holders
from megarl.types import Layout
from megarl.weights.hf_files import read_config
from megarl.weights.plan import TransferPlan
from megarl.weights.planner import collector_paused, plan
from megarl.weights.shard_map import ITEM_BYTES
from megarl.weights.topology import Distance, Place

MIB = 1 << 20
_LEAST_BUCKET_BYTES = max(ITEM_BYTES.values())


@dataclass(frozen=True, kw_only=True)
class WeightPlanRequest:
    """What to plan.

    Args:
        layout: of the trainer, on devices 0, 1, ...
        rollout: the engines, on the devices that follow, or with ``colocated`` on the trainer's.
        bucket_bytes: maximum size of a message.
        speeds: bytes per second of a rank's links, each way.
    """

    spec: ModelSpec
    layout: Layout
    rollout: EngineLayout
    devices_per_node: int
    colocated: bool
    bucket_bytes: int
    speeds: Mapping[Distance, float]

    def places(self) -> tuple[list[Place], list[Place]]:
        """Returns where the trainer's and the engines' ranks are."""
        trainers, engines = self.layout.world_size, self.rollout.tp * self.rollout.replicas
        first = 0 if self.colocated else trainers
        places = [Place(node=i // self.devices_per_node, device=i) for i in range(max(trainers, first + engines))]
        return places[:trainers], places[first : first + engines]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Bytes per rank of one side; idle ranks count as 0."""

    median: int
    maximum: int


@dataclass(frozen=True, kw_only=True)
class LinkTraffic:
    """The traffic over one kind of link.

    Args:
        sent, received: bytes of the ranks that send and receive the most over it.
        bytes_per_second: each way.
        seconds: of the rank that needs it longest.
    """

    messages: int
    nbytes: int
    sent: int
    received: int
    bytes_per_second: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class WeightsReport:
    """What a transfer takes.

    Args:
        parameters, model_bytes: of all canonical tensors.
        nbytes: payload of all messages.
        needed_bytes: every element of every engine rank's shard once, in its dtype, without padding.
        redundancy: ``nbytes / needed_bytes``.
        sent, received: per trainer rank, and per engine rank.
        bucket_bytes: of the largest bucket.
        staging_bytes: per rank, two such buckets.
        plan_seconds: shard maps included.
        links: by distance.
        slowest_rank_seconds, in_step_seconds: see ``Traffic.seconds``.
    """

    model: str
    parameters: int
    model_bytes: int
    trainer_ranks: int
    engine_ranks: int
    nbytes: int
    needed_bytes: int
    redundancy: float
    sent: Spread
    received: Spread
    messages: int
    bucket_bytes: int
    staging_bytes: int
    plan_seconds: float
    links: Mapping[str, LinkTraffic]
    slowest_rank_seconds: float
    in_step_seconds: float


def request(
    *, hf: str, train: str, rollout: str, devices_per_node: int, colocated: bool, bucket_mib: float, link: str
) -> WeightPlanRequest:
    """Parses the arguments of ``megarl plan weights``; raises ConfigError with every problem."""
    problems: list[Problem] = []
    layout, engines = train_layout(train, problems), rollout_layout(rollout, problems)
    speeds = link_speeds(link, problems)
    if not _LEAST_BUCKET_BYTES <= bucket_mib * MIB < math.inf:
        rule = f"must be at least {_LEAST_BUCKET_BYTES} bytes, an element of any dtype"
        problems.append(_problem("--bucket-mib", bucket_mib, rule, "256 is the default of a run"))
    if devices_per_node < 1:
        problems.append(_problem("--devices-per-node", devices_per_node, "must be 1 or more", "8 is the default"))
    spec: ModelSpec | None = None
    try:
        spec = model_spec(read_config(hf))
    except (ValueError, OSError) as error:
        problems.append(_problem("--hf", hf, str(error), "give a supported model's directory or its config.json"))
    if spec and layout:
        _fits(problems, "--train", train, lambda: spec.check_megatron(layout))
    if spec and engines:
        _fits(problems, "--rollout", rollout, lambda: spec.check_vllm(engines.tp))
    if colocated and layout and engines and engines.tp * engines.replicas > layout.world_size:
        rule = f"its {engines.tp * engines.replicas} ranks exceed the trainer's {layout.world_size} devices"
        problems.append(_problem("--rollout", rollout, rule, "use fewer replicas, or leave --colocated away"))
    if problems or spec is None or layout is None or engines is None:
        raise ConfigError(problems, "megarl plan weights")
    return WeightPlanRequest(
        spec=spec,
        layout=layout,
        rollout=engines,
        devices_per_node=devices_per_node,
        colocated=colocated,
        bucket_bytes=int(bucket_mib * MIB),
        speeds=speeds,
    )


@collector_paused()
def plan_weights(request: WeightPlanRequest) -> WeightsReport:
    start = perf_counter()
    spec, (trainers, engines) = request.spec, request.places()
    sources = trainer_holders(spec, request.layout, trainers)
    destinations = engine_holders(spec, request.rollout.tp, engines, first=len(sources))
    transfer = plan(sources, destinations, request.bucket_bytes)
    plan_seconds = perf_counter() - start
    traffic = Traffic.of(transfer, sources, destinations)
    content = {id(holder.map): content_bytes(holder.map) for holder in destinations[: request.rollout.tp]}
    needed = sum(content[id(holder.map)] for holder in destinations)
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
        sent=_sent(transfer, len(sources)),
        received=_spread([part.nbytes for part in transfer.receivers.values()]),
        messages=transfer.num_messages,
        bucket_bytes=transfer.staging_bytes,
        staging_bytes=2 * transfer.staging_bytes,
        plan_seconds=plan_seconds,
        links={name: _link(traffic, distance, request.speeds[distance]) for name, distance in LINKS.items()},
        slowest_rank_seconds=slowest,
        in_step_seconds=in_step,
    )


def _sent(transfer: TransferPlan, ranks: int) -> Spread:
    return _spread([transfer.senders[rank].nbytes if rank in transfer.senders else 0 for rank in range(ranks)])


def _spread(nbytes: list[int]) -> Spread:
    return Spread(median=int(np.median(nbytes)), maximum=max(nbytes))


def _link(traffic: Traffic, distance: Distance, speed: float) -> LinkTraffic:
    sent, received = traffic.sent[distance], traffic.received[distance]
    return LinkTraffic(
        messages=traffic.messages(distance),
        nbytes=int(sent.sum()),
        sent=int(sent.max()),
        received=int(received.max()),
        bytes_per_second=speed,
        seconds=float(np.maximum(sent, received).max()) / speed,
    )


def _fits(problems: list[Problem], option: str, value: str, check: Callable[[], None]) -> None:
    try:
        check()
    except ValueError as error:
        problems.append(_problem(option, value, str(error), "choose a layout that fits"))


def _problem(option: str, value: object, rule: str, fix: str) -> Problem:
    return Problem(field=option, value=str(value), rule=rule, fix=fix)


_KEY_WIDTH = 14
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_MODEL = (
    "the slowest rank alone, to all ranks in step, where each bucket takes as long as its slowest rank. "
    "A rank sends and receives at once, at the GB/s above each way, over one kind of link after the other. "
    "Packing, loading and congestion come on top."
)
_FAR = {"device": "same device", "node": "same node", "network": "other nodes"}


def print_weights(request: WeightPlanRequest, report: WeightsReport, console: Console | None = None) -> None:
    out = console or Console(highlight=False)
    for key, text in _lines(request, report):
        out.print(f"{key:{_KEY_WIDTH}}{text}", soft_wrap=True, markup=False)
    out.print()
    columns = ("distance", "messages", "bytes", "most sent", "most received", "GB/s", "seconds")
    table = Table(*columns, box=None)
    for name, link in report.links.items():
        most = (shown(link.sent), shown(link.received)) if link.messages else ("", "")
        speed = f"{link.bytes_per_second / 1e9:g}"
        table.add_row(_FAR[name], str(link.messages), shown(link.nbytes), *most, speed, f"{link.seconds:.3f}")
    out.print(table)
    out.print()
    seconds = f"{report.slowest_rank_seconds:.3f} s to {report.in_step_seconds:.3f} s"
    out.print(f"{'estimate':{_KEY_WIDTH}}{seconds}: {_MODEL}", soft_wrap=True)


def shown(nbytes: float) -> str:
    """Formats bytes in the unit that suits them."""
    unit = 0
    while nbytes >= 1024 and unit < len(_UNITS) - 1:
        nbytes /= 1024
        unit += 1
    return f"{nbytes:.0f} B" if unit == 0 else f"{nbytes:.2f} {_UNITS[unit]}"


def _lines(request: WeightPlanRequest, report: WeightsReport) -> list[tuple[str, str]]:
    layout, rollout = request.layout, request.rollout
    degrees = f"TP {layout.tp} x PP {layout.pp} x DP {layout.dp}"
    degrees += f", VPP {layout.vpp}" if layout.vpp > 1 else ""
    degrees += f", EP {layout.ep}" if layout.ep > 1 else ""
    where = "the trainer's devices" if request.colocated else "devices of their own"
    model_bytes = f"{shown(report.model_bytes)} in {request.spec.dtype}"
    return [
        ("model", f"{report.model}, {_count(report.parameters)} parameters, {model_bytes}"),
        ("trainer", f"{report.trainer_ranks} ranks: {degrees}; {request.devices_per_node} devices per node"),
        ("engines", f"{report.engine_ranks} ranks: {rollout.replicas} x TP {rollout.tp}, on {where}"),
        ("bytes", f"{shown(report.nbytes)} in {report.messages} messages"),
        ("needed", f"{shown(report.needed_bytes)}: each element of each engine rank's shard once, without padding"),
        ("redundancy", f"{report.redundancy:.4f} (bytes / needed)"),
        ("sent", f"per trainer rank: {_spread_text(report.sent)}"),
        ("received", f"per engine rank: {_spread_text(report.received)}"),
        ("staging", f"per rank: {shown(report.staging_bytes)}, two of the largest bucket"),
        ("planned in", f"{report.plan_seconds:.2f} s, shard maps included"),
    ]


def _count(number: int) -> str:
    for name, size in (("billion", 10**9), ("million", 10**6)):
        if number >= size:
            return f"{number / size:.2f} {name}"
    return f"{number:,}"


def _spread_text(spread: Spread) -> str:
    return f"median {shown(spread.median)}, maximum {shown(spread.maximum)}"
