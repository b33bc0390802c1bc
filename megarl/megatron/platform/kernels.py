"""What computes each part of a pass on each device, and why.

Fused kernels are used on CUDA unless ``model.kernels`` is ``reference`` (``RoleSpec.fused``), and
never on a CPU. Layers are of one kind for a whole model, see ``layer_kind``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Iterator
from typing import Any, Literal, cast

import torch

from megarl.config.schema import LayerChoice
from megarl.models.dims import Dims
from megarl.models.hf_config import LayerSpec
from megarl.models.transformer_engine import refusals

Device = Literal["cpu", "cuda"]
LayerKind = Literal["local", "transformer_engine"]

FUSED = {
    "norms": "torch's F.rms_norm: 0.19 ms, op by op 0.75",
    "activation": "Megatron's compiled SwiGLU: 0.63 ms, op by op 1.16",
    "rope": "Megatron's, compiled: 0.49 ms, op by op 0.64",
    "logprobs": "Triton kernels; not yet timed (compiled by torch 34 ms, op by op 83)",
}
"""What computes each part on CUDA where kernels are fused.

The times are an H200's (2026-11-27), forward and backward, for 8,192 tokens of a 1.5B model
(``benchmarks/results/gpu.txt``).
"""


@functools.cache
def compiled(function: Any) -> Any:
    """Returns the function, compiled at its first call with each dtype, width and requires_grad."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = 64  # of a function; beyond it, torch runs the function eagerly
    return torch.compile(function)


def layer_kind(wanted: LayerChoice, dims: Dims, kinds: Collection[LayerSpec], dtype: str, device: str) -> LayerKind:
    """Returns the kind of a model's layers; raises ValueError if the wanted one cannot be used."""
    if wanted == "local":
        return "local"
    reasons = [*device_refusals(device), *refusals(dims, kinds, dtype)]
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
    failure = transformer_engine_failure()
    if failure is not None:
        yield f"Transformer Engine is not installed, or cannot be imported ({failure})"
    major, minor = torch.cuda.get_device_capability()
    if major < 9:
        yield f"compute capability {major}.{minor}: cuDNN's packed attention needs 9.0"


@functools.cache
def transformer_engine_failure() -> str | None:
    """Imports Transformer Engine; where that fails, returns why, and hides it from megatron-core.

    megatron-core (0.19) does without Transformer Engine if importing it raises ImportError. The
    loader of its libraries also raises OSError, AssertionError and RuntimeError
    (common/__init__.py, 2.20).
    """
    try:
        import transformer_engine.pytorch  # noqa: F401  # pyright: ignore[reportMissingImports]
    except Exception as error:
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
            del sys.modules[name]
        sys.modules["transformer_engine"] = cast(Any, None)  # its import raises ModuleNotFoundError
        return f"{type(error).__name__}: {error}"
    return None


def report(device: Device) -> list[tuple[str, str, str]]:
    """Returns (part, what computes it, why) for a process on a device, as ``megarl doctor`` prints it."""
    reasons = "; ".join(device_refusals(device))
    if reasons:
        rows = [("layers", "Megatron's own", reasons)]
    else:
        limits = "16 bits, no experts, heads of multiples of 8 up to 128; others Megatron's own"
        rows = [("layers", "Transformer Engine's", limits)]
    for part, what in FUSED.items():
        if device == "cpu":
            rows.append((part, "op by op", "a run on a CPU keeps its numbers, bit for bit"))
        else:
            rows.append((part, "fused", what))
    return rows
