"""The least time that a policy's update can take on one GPU, by kind of kernel, beside what it took.

Operations take the rate that products of the model's shapes reach, and bytes the speed of a copy on the device. The
bytes are those of the program with fused kernels: `tests/megatron/test_host_waits.py` holds them to what it counts in
an update whose gradient is not clipped, but for Adam's, whose fused kernel is counted by its definition. Attention
computes its scores again in the backward pass. What an update takes beyond that is lost: to operations one by one, slow
kernels and recomputation, or, where no kernel runs, to a device that waits for its host.
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
VALUE_BYTES = 2
GRADIENT_BYTES = 10
"""Bytes of a parameter in a micro-batch: its gradient in bfloat16 is added to the sum in float32."""
ADAM_BYTES = 28
"""Bytes of a parameter in a step: fused Adam reads its float32 value, gradient and moments, and writes all but the
gradient."""
AROUND_ADAM_BYTES = 22
"""Bytes of a parameter in a step: its gradient is set to zero, scaled, and read for the norm; its value is copied to
the weight."""


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """What the device reaches: products of the model's shapes, and bytes read or written by a copy."""

    tflops: float
    gb_per_second: float

    @classmethod
    def read(cls, size: str, found: Mapping[str, float]) -> Speeds:
        """Takes them from the results of `benchmarks.gpu.kernels`, where a copy counts what it writes."""
        return cls(tflops=found[f"products/{size}/tflops"], gb_per_second=2 * found["copy/gb_per_second"])


def layer_values(size: Size) -> int:
    """Returns the values that kernels but products and attention read or write for a token in a layer.

    The model has grouped-query attention with more than one head of keys; in others, queries are not copied.
    """
    queries = size.heads * size.head_dim
    keys = size.kv_heads * size.head_dim
    rotated = queries + keys
    projected = rotated + keys
    norms = 2 * 5 * size.hidden
    sums = 2 * 6 * size.hidden
    swiglu = (3 + 5) * size.ffn
    rope = 4 * rotated + 8 * size.head_dim  # the angles are in float32
    copies = 2 * queries + 2 * projected  # queries forward, and the gradients of all three, which are joined
    if size.family == "qwen3":
        of_projection = 5 * rotated  # norms of heads
    else:
        of_projection = 3 * projected  # a bias, and its gradient
    return norms + sums + swiglu + rope + copies + of_projection


def logit_values(size: Size) -> int:
    """Returns the values that kernels but products read or write for a token at which the output layer is read."""
    return 3 * size.vocab


def layer_parameters(size: Size) -> int:
    """Returns the parameters of a layer's products."""
    queries = size.heads * size.head_dim
    keys = size.kv_heads * size.head_dim
    return size.hidden * (2 * queries + 2 * keys + 3 * size.ffn)


def least_seconds(size: Size, speeds: Speeds, *, tokens: float, read: float, flops: float) -> dict[str, float]:
    """Returns the seconds of an update by kind of kernel.

    Args:
        read: tokens at which the output layer is read.
        flops: operations of forward and backward passes as a run counts them; attention's are what is left of them.
    """
    head = size.hidden * size.vocab
    products = 6 * (size.layers * layer_parameters(size) * tokens + head * read)
    attention = (flops - products) * 7 / 6  # seven products in place of twice three
    values = size.layers * layer_values(size) * tokens + logit_values(size) * read
    parameters = size.layers * layer_parameters(size) + head
    gradients = GRADIENT_BYTES * parameters * math.ceil(tokens / size.micro_batch)
    rate, speed = 1e12 * speeds.tflops, 1e9 * speeds.gb_per_second
    return {
        "products": products / rate,
        "attention": attention / rate,
        _OTHERS: (VALUE_BYTES * values + gradients) / speed,
        "optimizer": (ADAM_BYTES + AROUND_ADAM_BYTES) * parameters / speed,
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
