"""What computes each part of a pass on each device, and why.

``TABLE`` alone decides between a kernel's operations one by one and the same fused by ``torch.compile``. Layers are of
one kind for a whole model, see ``layer_kind``.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megarl.config.schema import LayerChoice
from megarl.models.param_types import Dims
from megarl.models.transformer_engine import refusals

Kernel = Literal["norms", "activation", "rope", "logprobs"]
Device = Literal["cpu", "cuda"]
LayerKind = Literal["local", "transformer_engine"]


@dataclass(frozen=True)
class KernelChoice:
    """The implementation of a kernel on a device."""

    kernel: Kernel
    device: Device
    implementation: Literal["eager", "compiled"]
    why: str


_SAME_BITS = "a run on a CPU keeps its numbers, bit for bit"

TABLE = (
    KernelChoice("norms", "cpu", "eager", _SAME_BITS),
    KernelChoice("activation", "cpu", "eager", _SAME_BITS),
    KernelChoice("rope", "cpu", "eager", _SAME_BITS),
    KernelChoice("logprobs", "cpu", "eager", _SAME_BITS),
    KernelChoice("norms", "cuda", "eager", "0.75 ms, compiled 0.97"),
    KernelChoice("activation", "cuda", "compiled", "0.63 ms, op by op 1.16"),
    KernelChoice("rope", "cuda", "compiled", "0.49 ms, op by op 0.64"),
    KernelChoice("logprobs", "cuda", "compiled", "34 ms, op by op 83"),
)
"""To be changed by measurements only: the part ``kernels`` of ``benchmarks.gpu`` prints the faster implementation.

The times of CUDA are of an H200 (2026-11-27), forward and backward, for 8,192 tokens of a 1.5B model
(``benchmarks/results/gpu.txt``).
"""

_COMPILED = {(row.kernel, row.device) for row in TABLE if row.implementation == "compiled"}


def is_compiled(kernel: Kernel, device: str) -> bool:
    """Returns whether a kernel is compiled for a type of device."""
    return (kernel, device) in _COMPILED


def implementation[F: Callable[..., Any]](kernel: Kernel, eager: F, device: str) -> F:
    """Returns what computes a function on a type of device: itself, or itself compiled."""
    return compiled(eager) if is_compiled(kernel, device) else eager


def compiled[F: Callable[..., Any]](eager: F) -> F:
    """Returns the function compiled at its first call: for each dtype, width and need of gradients, for all lengths."""
    return _compiled(eager)


@functools.cache
def _compiled(eager: Any) -> Any:
    import torch._dynamo

    torch._dynamo.config.recompile_limit = 64  # of a function; beyond it, torch runs the function eagerly
    return torch.compile(eager)


def layer_kind(wanted: LayerChoice, dims: Dims, dtype: str, device: str) -> LayerKind:
    """Returns the kind of a model's layers; raises ValueError if the wanted one cannot compute it here.

    Args:
        device: the type of the process's own.
    """
    if wanted == "local":
        return "local"
    reasons = [*device_refusals(device), *refusals(dims, dtype)]
    if wanted == "transformer_engine" and reasons:
        fix = "set it to auto, which takes Megatron's own layers then"
        raise ValueError(f"model.layers: transformer_engine cannot be used: {'; '.join(reasons)}; {fix}")
    return "local" if reasons else "transformer_engine"


def device_refusals(device: str) -> Iterator[str]:
    """Yields why no model has Transformer Engine's layers in this process."""
    if device != "cuda":
        yield "Transformer Engine needs a CUDA device"
        return
    try:
        import transformer_engine.pytorch  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        yield f"Transformer Engine is not installed, or cannot be imported ({error})"
    major, minor = torch.cuda.get_device_capability()
    if major < 9:
        yield f"compute capability {major}.{minor}: cuDNN's packed attention needs 9.0"


def report(device: Device) -> list[tuple[str, str, str]]:
    """Returns (part, what computes it, why) for a process on a device, as ``megarl doctor`` prints it."""
    reasons = list(device_refusals(device))
    found: dict[str, tuple[str, str]] = {
        "layers": ("Megatron's own", "; ".join(reasons)),
        "attention": ("torch's varlen_attn", "in 16 bits, heads up to 256; else scaled_dot_product_attention"),
        **{row.kernel: (row.implementation, row.why) for row in TABLE if row.device == device},
        "adam": _adam(device),
    }
    if device == "cpu":
        why = "of a few padded rectangles: torch's packed kernel is CUDA's"
        found["attention"] = "scaled_dot_product_attention", why
    elif not reasons:
        limits = "16 bits, no experts, heads of multiples of 8 up to 128; others Megatron's own"
        own = ": ".join(found["norms"])
        found["layers"] = "Transformer Engine's", limits
        found["attention"] = "Transformer Engine's", "in its layers; in Megatron's own, torch's varlen_attn"
        found["norms"] = "Transformer Engine's", f"in its layers; in Megatron's own, {own}"
    return [(part, what, why) for part, (what, why) in found.items()]


def _adam(device: Device) -> tuple[str, str]:
    for module, name in (
        ("transformer_engine.pytorch.optimizers", "Transformer Engine's"),
        ("apex.optimizers", "apex's"),
    ):
        if device == "cuda":
            with suppress(ImportError):
                importlib.import_module(module)
                return name, "fused; Megatron takes the first of Transformer Engine, apex and torch"
    return "torch", "neither Transformer Engine nor apex" if device == "cuda" else "fused kernels need CUDA"
