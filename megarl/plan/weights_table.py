"""How the plan of a transfer of weights is shown."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from megarl.plan.weights import Request, Spread, WeightsReport

_KEY_WIDTH = 14
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_MODEL = (
    "the slowest rank alone, to all ranks in step, where each bucket takes as long as its slowest rank. "
    "A rank sends and receives at once, at the GB/s above each way, over one kind of link after the other. "
    "Packing, loading and congestion come on top."
)
_FAR = {"device": "same device", "node": "same node", "network": "other nodes"}


def print_weights(request: Request, report: WeightsReport, console: Console | None = None) -> None:
    """Prints what the transfer takes, and how the estimate is made."""
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
    """A number of bytes in the unit that suits it."""
    unit = 0
    while nbytes >= 1024 and unit < len(_UNITS) - 1:
        nbytes /= 1024
        unit += 1
    return f"{nbytes:.0f} B" if unit == 0 else f"{nbytes:.2f} {_UNITS[unit]}"


def _lines(request: Request, report: WeightsReport) -> list[tuple[str, str]]:
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
        ("sent", f"per trainer rank: {_spread(report.sent)}"),
        ("received", f"per engine rank: {_spread(report.received)}"),
        ("staging", f"per rank: {shown(report.staging_bytes)}, two of the largest bucket"),
        ("planned in", f"{report.plan_seconds:.2f} s, shard maps included"),
    ]


def _count(number: int) -> str:
    """A number of parameters for people."""
    for name, size in (("billion", 10**9), ("million", 10**6)):
        if number >= size:
            return f"{number / size:.2f} {name}"
    return f"{number:,}"


def _spread(spread: Spread) -> str:
    return f"median {shown(spread.median)}, maximum {shown(spread.maximum)}"
