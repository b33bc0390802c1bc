"""Gloo and NCCL behind one interface: which device tensors live on, and which backend connects the ranks."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Platform:
    """Where one rank computes.

    Args:
        device: of its tensors.
        backend: of its process groups.
    """

    device: torch.device
    backend: str


def start_platform(kind: str) -> Platform:
    """Makes this process ready for megatron-core; call it before anything of Megatron's is built.

    Args:
        kind: "cuda", where the process sees one device, or "cpu", where it gets the shim of ``platform.cpu``.

    Raises:
        RuntimeError: CUDA is asked for and there is none.
    """
    if kind == "cpu":
        from megarl.megatron.platform import cpu

        cpu.install()
        _define_absent_kernels()
        return Platform(device=torch.device("cpu"), backend="gloo")
    if not torch.cuda.is_available():
        raise RuntimeError("cluster.device is cuda, but torch sees no CUDA device; set cluster.device=cpu")
    torch.cuda.set_device(0)
    _define_absent_kernels()
    return Platform(device=torch.device("cuda", 0), backend="nccl")


def _define_absent_kernels() -> None:
    """Without Transformer Engine, Megatron's router asks for a name that nobody defines (moe/moe_utils.py, 0.16.1)."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def start_world(
    platform: Platform, *, rank: int, world_size: int, init_method: str, timeout_seconds: float = 600.0
) -> None:
    """Joins the torch.distributed world of the group; its collectives fail after ``timeout_seconds``."""
    dist.init_process_group(
        platform.backend,
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_seconds),
    )
    from megatron.core import parallel_state

    # Scratch memory for sequence parallelism, by dtype: the one global state of Megatron that we make.
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
