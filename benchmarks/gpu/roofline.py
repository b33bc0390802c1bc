"""The least time that a policy's update can take on one GPU, by kind of kernel, beside what it took.

Operations take the rate that products of the model's shapes reach, and bytes the speed of a copy on the device. Each
kernel reads its inputs and writes its results once, as fused ones do, in bfloat16; attention computes its scores
again in the backward pass, and products add up the gradients of weights in float32. What an update takes beyond that
is lost: to operations one by one, slow kernels and recomputation, or, where no kernel runs, to a device that waits
for its host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.work import Size

KINDS: Mapping[str, tuple[str, ...]] = {
    "attention": ("flash", "fmha", "attention", "attn"),
    "products": ("gemm", "nvjet", "cutlass", "aten::mm", "aten::addmm", "aten::bmm"),
    "optimizer": ("adam", "multi_tensor_apply"),
}
"""Kinds of kernels by parts of their names, the first that occurs; `element by element` are all others."""
_OTHERS = "element by element"
_VALUE = 2
_GRADIENT_BYTES = 8
"""Bytes of a value in bfloat16; and those read and written of a parameter's gradient per micro-batch."""
_ADAM_BYTES = 38
"""Bytes of a parameter per step: master, two moments and gradient read, all but the latter written, and the weight; the
gradient is also read for its norm, and set to zero."""


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """What the device reaches: products of the model's shapes, and bytes read or written by a copy."""

    tflops: float
    gb_per_second: float

    @classmethod
    def read(cls, size: str, found: Mapping[str, float]) -> Speeds:
        """Takes them from the results of `benchmarks.gpu.kernels`, where a copy counts what it writes."""
        return cls(tflops=found[f"products/{size}/tflops"], gb_per_second=2 * found["copy/gb_per_second"])


def least_seconds(size: Size, speeds: Speeds, *, tokens: float, read: float, flops: float) -> dict[str, float]:
    """Returns the seconds of an update by kind of kernel.

    Args:
        read: tokens at which the output layer is read.
        flops: operations of forward and backward passes as a run counts them; attention's are what is left of them.
    """
    hidden, ffn = size.hidden, size.ffn
    heads = hidden + hidden // size.heads * size.kv_heads  # values of queries and keys
    layer = hidden * (2 * heads + 3 * ffn)
    products = 6 * (size.layers * layer * tokens + hidden * size.vocab * read)
    attention = (flops - products) * 7 / 6  # seven products in place of twice three
    forward = 10 * hidden + 2 * heads + 3 * ffn  # two norms and sums, rope, SwiGLU
    backward = 12 * hidden + 2 * heads + 5 * ffn
    values = size.layers * (forward + backward) * tokens + 3 * size.vocab * read
    parameters = size.layers * layer + size.vocab * hidden
    gradients = _GRADIENT_BYTES * parameters * math.ceil(tokens / size.micro_batch)
    rate, speed = 1e12 * speeds.tflops, 1e9 * speeds.gb_per_second
    return {
        "products": products / rate,
        "attention": attention / rate,
        _OTHERS: (_VALUE * values + gradients) / speed,
        "optimizer": _ADAM_BYTES * parameters / speed,
    }


def taken_seconds(call: Mapping[str, Any]) -> dict[str, float]:
    """Returns the seconds of a profiled call by kind of kernel, and those without a kernel."""
    taken: dict[str, float] = {"products": 0.0, "attention": 0.0, _OTHERS: 0.0, "optimizer": 0.0}
    for kernel in call["kernels"]:
        name = kernel["name"].lower()
        kinds = [kind for kind, words in KINDS.items() if any(word in name for word in words)]
        taken[kinds[0] if kinds else _OTHERS] += kernel["seconds"]
    taken["no kernel"] = max(0.0, call["seconds"] - sum(taken.values()))
    return taken


def compare(
    size: Size, speeds: Speeds, run: Mapping[str, float], calls: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Returns `least/KIND` and `taken/KIND` in seconds, and `least/mfu`, what MFU would be if nothing were lost.

    Args:
        run: means of a run, see `work.figures`.
        calls: profiles of a trainer's calls in one of its steps.
    """
    (update,) = (call for call in calls if call["name"] == "update.update")
    flops = 1e12 * run["perf/tflop/actor_update"]
    read = run["response_length/mean"] * size.prompts * size.samples
    least = least_seconds(size, speeds, tokens=run["perf/tokens/actor_update"], read=read, flops=flops)
    found = {f"least/{kind}": seconds for kind, seconds in least.items()}
    found |= {f"taken/{kind}": seconds for kind, seconds in taken_seconds(update).items()}
    if "perf/mfu/actor_update" in run:  # the peak of the device is known
        peak = run["perf/tflops_per_device/actor_update"] / run["perf/mfu/actor_update"]
        found["least/mfu"] = flops / 1e12 / peak / sum(least.values())
    return found


def table(name: str, figures: Mapping[str, Any]) -> list[str]:
    """Returns the lines that say where the update of a run loses time; none without a comparison."""
    taken = {key.removeprefix("taken/"): value for key, value in figures.items() if key.startswith("taken/")}
    if not taken:
        return []
    rows = [f"{name}, seconds of an update   at least   taken (in the profiled step)"]
    for kind, seconds in taken.items():
        least = f"{figures[f'least/{kind}']:8.3f}" if f"least/{kind}" in figures else " " * 8
        rows.append(f"  {kind:24}   {least}   {seconds:8.3f}")
    if "least/mfu" in figures:
        mfu, best = figures["perf/mfu/actor_update"], figures["least/mfu"]
        rows.append(f"  MFU {mfu:.3f}; {best:.3f} if nothing were lost")
    return rows
