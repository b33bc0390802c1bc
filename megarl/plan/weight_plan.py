"""The plan of a weight transfer from trainers to engines, made without weights or devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from megarl.files import format_bytes
from megarl.garbage_collection import collector_paused
from megarl.models import model_spec
from megarl.resharding.spec import engine_holders, trainer_holders
from megarl.types import AnyArray, Layout
from megarl.weights.hf_files import read_config
from megarl.weights.plan import TransferPlan
from megarl.weights.planner import Place, plan
from megarl.weights.shard_map import ITEM_BYTES, ShardMap

_SPEEDS = {"device": 2000.0, "node": 400.0, "network": 50.0}
"""GB/s of one rank, each way: copies in a GPU's memory, NVLink 4, a 400 Gbit/s network card per GPU."""
_FAR = {"device": "same device", "node": "same node", "network": "other nodes"}
_ESTIMATE = "from the slowest rank alone to all ranks in step; packing, loading and congestion come on top"


@collector_paused()
def plan_weights(
    *,
    hf: str,
    train: str,
    rollout: str,
    devices_per_node: int,
    colocated: bool,
    bucket_mib: float,
    link: str,
) -> dict[str, Any]:
    """Plans a transfer from the options of ``megarl plan weights``; returns what ``--json`` prints.

    ``redundancy`` is ``nbytes``, of all messages, over ``needed_bytes``, of all elements of the
    engines' shards. ``sent`` is per trainer rank and ``received`` per engine rank, idle ones
    included. ``staging_bytes`` are two of the largest bucket. A link has the bytes of the ranks
    that send and receive the most over it, and the time of the rank that needs it longest.

    The duration lies between two estimates: ``slowest_rank_seconds``, and ``in_step_seconds``, if
    all ranks begin every bucket together: the sum over buckets of each one's slowest rank. Ranks
    send and receive at the same time, at the link's speed in each direction, and use one link after
    the other; packing, loading and congestion are ignored.

    Raises:
        ValueError or OSError: an option is wrong, or does not fit the model.
    """
    sizes: dict[str, Any] = _parse_pairs("--train", train, ("tp", "pp", "dp", "vpp", "ep"), int)
    layout = Layout(**sizes)
    engine_sizes = _parse_pairs("--rollout", rollout, ("tp", "replicas"), int)
    gigabytes = {**_SPEEDS, **_parse_pairs("--link", link, tuple(_SPEEDS), float)}
    tp = engine_sizes.get("tp", 1)
    replicas = engine_sizes.get("replicas", 1)
    spec = model_spec(read_config(hf))
    spec.check_megatron(layout)
    spec.check_vllm(tp)
    trainers = layout.world_size
    engines = tp * replicas
    if colocated and engines > trainers:
        ranks = f"the engines' {engines} ranks"
        raise ValueError(f"--colocated: {ranks} exceed the trainer's {trainers} devices")
    start = perf_counter()
    first = 0 if colocated else trainers
    devices = [*range(trainers), *range(first, first + engines)]
    places = [Place(node=device // devices_per_node, device=device) for device in devices]
    sources = trainer_holders(spec, layout, places[:trainers])
    destinations = engine_holders(spec, tp, places[trainers:], first=trainers)
    transfer = plan(sources, destinations, int(bucket_mib * 2**20))
    plan_seconds = perf_counter() - start

    sent = [0] * trainers
    for rank, part in transfer.senders.items():
        sent[rank] = part.nbytes
    needed = replicas * sum(_content_bytes(holder.map) for holder in destinations[:tp])
    tensors = spec.canonical().values()
    return {
        "model": spec.family.model_type,
        "parameters": sum(math.prod(info.shape) for info in tensors),
        "model_bytes": sum(info.nbytes for info in tensors),
        "trainer_ranks": trainers,
        "engine_ranks": engines,
        "nbytes": transfer.nbytes,
        "needed_bytes": needed,
        "redundancy": transfer.nbytes / needed,
        "sent": _spread(sent),
        "received": _spread([part.nbytes for part in transfer.receivers.values()]),
        "messages": transfer.num_messages,
        "bucket_bytes": transfer.staging_bytes,
        "staging_bytes": 2 * transfer.staging_bytes,
        "plan_seconds": plan_seconds,
        **_estimate(transfer, places, gigabytes),
    }


def _parse_pairs[T: (int, float)](
    option: str, text: str, keys: Sequence[str], parse: Callable[[str], T]
) -> dict[str, T]:
    """Parses ``key=value,key=value`` of numbers above 0."""
    values: dict[str, T] = {}
    for entry in filter(None, text.split(",")):
        key, _, given = map(str.strip, entry.partition("="))
        if key not in keys or key in values:
            known = f"{', '.join(keys)}, each once; for example {keys[0]}=2,{keys[1]}=4"
            raise ValueError(f"{option}: {entry!r} must be KEY=NUMBER, with KEY of {known}")
        values[key] = parse("0")
        with suppress(ValueError):
            values[key] = parse(given)
        if not 0 < values[key] < math.inf:
            raise ValueError(f"{option}: {key} must be a number above 0, not {given!r}")
    return values


def _estimate(transfer: TransferPlan, places: Sequence[Place], gigabytes: Mapping[str, float]) -> dict[str, Any]:
    """Returns the traffic over each link, and both durations; ranks are numbered as their places.

    Args:
        gigabytes: speeds of a rank's links, per second.
    """
    rows: list[tuple[int, ...]] = []
    for part in transfer.senders.values():
        for message in part.messages:
            rows.append((message.sender, message.receiver, message.bucket, message.nbytes))
    sender, receiver, bucket, nbytes = np.array(rows).T
    nodes = np.array([place.node for place in places])
    devices = np.array([place.device for place in places])
    near = np.where(nodes[sender] == nodes[receiver], 1, 2)
    link = np.where(devices[sender] == devices[receiver], 0, near)
    shape = (len(gigabytes), int(bucket.max()) + 1, len(places))
    traffic: list[AnyArray] = []  # sent and received, by link, bucket and rank
    for rank in (sender, receiver):
        index = np.ravel_multi_index((link, bucket, rank), shape)
        # Sums in float64, exact below 2**53 bytes.
        sums = np.bincount(index, weights=nbytes, minlength=math.prod(shape))
        traffic.append(sums.reshape(shape))
    speeds = 1e9 * np.array(list(gigabytes.values()))
    in_step = np.maximum(*traffic) / speeds[:, None, None]
    sent, received = (column.sum(1) for column in traffic)
    alone = np.maximum(sent, received) / speeds[:, None]
    links: dict[str, Any] = {}
    for number, name in enumerate(gigabytes):
        links[name] = {
            "messages": int((link == number).sum()),
            "nbytes": int(sent[number].sum()),
            "sent": int(sent[number].max()),
            "received": int(received[number].max()),
            "bytes_per_second": float(speeds[number]),
            "seconds": float(alone[number].max()),
        }
    return {
        "links": links,
        "slowest_rank_seconds": float(alone.sum(0).max()),
        "in_step_seconds": float(in_step.sum(0).max(1).sum()),
    }


def _content_bytes(shard_map: ShardMap) -> int:
    """Returns the bytes of a map's parameters without padding."""
    nbytes = shard_map.nbytes
    for param, box in shard_map.padding:
        nbytes -= box.size * ITEM_BYTES[shard_map.params[param].dtype]
    return nbytes


def _spread(nbytes: Sequence[int]) -> dict[str, int]:
    return {"median": int(np.median(nbytes)), "maximum": max(nbytes)}


def print_weights(report: dict[str, Any]) -> None:
    seconds = f"{report['slowest_rank_seconds']:.3f} s to {report['in_step_seconds']:.3f} s"
    lines = {
        "model": f"{report['model']}, {report['parameters']:,} parameters, {format_bytes(report['model_bytes'])}",
        "ranks": f"{report['trainer_ranks']} of the trainer, {report['engine_ranks']} of engines",
        "bytes": f"{format_bytes(report['nbytes'])} in {report['messages']} messages",
        "redundancy": f"{report['redundancy']:.4f} of {format_bytes(report['needed_bytes'])} in the engines' shards",
        "sent": f"per trainer rank, {_spread_text(report['sent'])}",
        "received": f"per engine rank, {_spread_text(report['received'])}",
        "staging": f"{format_bytes(report['staging_bytes'])} per rank, two of the largest bucket",
        "planned in": f"{report['plan_seconds']:.2f} s",
        "estimate": f"{seconds}, {_ESTIMATE}",
    }
    out = Console(highlight=False)
    for key, text in lines.items():
        out.print(f"{key:14}{text}", soft_wrap=True, markup=False)
    table = Table("distance", "messages", "bytes", "most sent", "most received", "GB/s", "seconds", box=None)
    for name, link in report["links"].items():
        sizes = (format_bytes(link[key]) for key in ("nbytes", "sent", "received"))
        speed = link["bytes_per_second"] / 1e9
        table.add_row(_FAR[name], str(link["messages"]), *sizes, f"{speed:g}", f"{link['seconds']:.3f}")
    out.print(table)


def _spread_text(spread: dict[str, int]) -> str:
    return f"median {format_bytes(spread['median'])}, maximum {format_bytes(spread['maximum'])}"
