"""What computes each part of a pass on each device, and why.

``TABLE`` alone decides between a kernel's operations one by one and the same fused by
``torch.compile``. Layers are of one kind for a whole model, see ``layer_kind``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch

from megarl.config.schema import LayerChoice
from megarl.models.param_types import Dims
from megarl.models.transformer_engine import refusals

Kernel = Literal["norms", "activation", "rope", "logprobs"]
Device = Literal["cpu", "cuda"]
LayerKind = Literal["local", "transformer_engine"]

TABLE: dict[Kernel, tuple[Literal["eager", "compiled"], str]] = {
    "norms": ("eager", "0.75 ms, compiled 0.97"),
    "activation": ("compiled", "0.63 ms, op by op 1.16"),
    "rope": ("compiled", "0.49 ms, op by op 0.64"),
    "logprobs": ("compiled", "34 ms, op by op 83"),
}
"""The implementation of each kernel on CUDA, and why; on a CPU all are eager.

Only measurements change it: the part ``kernels`` of ``benchmarks.gpu`` prints the faster one. The
times are an H200's (2026-11-27), forward and backward, for 8,192 tokens of a 1.5B model
(``benchmarks/results/gpu.txt``).
"""


def is_compiled(kernel: Kernel, device: str) -> bool:
    """Returns whether a kernel is compiled for a type of device."""
    return device == "cuda" and TABLE[kernel][0] == "compiled"


def implementation[F: Callable[..., Any]](kernel: Kernel, eager: F, device: str) -> F:
    """Returns a function as it is computed on a type of device: itself, or itself compiled."""
    return compiled(eager) if is_compiled(kernel, device) else eager


@functools.cache
def compiled(eager: Any) -> Any:
    """Returns the function, compiled at its first call with each dtype, width and requires_grad."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = 64  # of a function; beyond it, torch runs the function eagerly
    return torch.compile(eager)


def layer_kind(wanted: LayerChoice, dims: Dims, dtype: str, device: str) -> LayerKind:
    """Returns the kind of a model's layers; raises ValueError if the wanted one cannot be used."""
    if wanted == "local":
        return "local"
    reasons = [*device_refusals(device), *refusals(dims, dtype)]
    if not reasons:
        return "transformer_engine"
    if wanted == "transformer_engine":
        problem = f"model.layers: transformer_engine cannot be used: {'; '.join(reasons)}"
        raise ValueError(f"{problem}; set it to auto, which takes Megatron's own layers then")
    return "local"


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
    reasons = "; ".join(device_refusals(device))
    if reasons:
        rows = [("layers", "Megatron's own", reasons)]
    else:
        limits = "16 bits, no experts, heads of multiples of 8 up to 128; others Megatron's own"
        rows = [("layers", "Transformer Engine's", limits)]
    for kernel, (choice, why) in TABLE.items():
        if device == "cpu":
            rows.append((kernel, "eager", "a run on a CPU keeps its numbers, bit for bit"))
        else:
            rows.append((kernel, choice, why))
    return rows
