"""CPU with Gloo and CUDA with NCCL behind one interface."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from megarl.megatron.platform.kernels import implementation
from megarl.resharding import serve_store


@dataclass(frozen=True, kw_only=True)
class Platform:
    """The device of a rank's tensors, and the backend of its process groups."""

    device: torch.device
    backend: str


def start_platform(kind: str) -> Platform:
    """Prepares this process for megatron-core on "cuda", with one visible device, or "cpu", with ``platform.cpu``."""
    if kind == "cpu":
        from megarl.megatron.platform import cpu

        cpu.install()
        platform = Platform(device=torch.device("cpu"), backend="gloo")
    elif torch.cuda.is_available():
        torch.cuda.set_device(0)
        platform = Platform(device=torch.device("cuda", 0), backend="nccl")
    else:
        raise RuntimeError("cluster.device is cuda, but torch sees no CUDA device; set cluster.device=cpu")
    from megatron.core.models.common.embeddings import rope_utils

    # Rotates queries and keys; Megatron's own fused one needs Transformer Engine.
    rope_utils._apply_rotary_pos_emb_bshd = implementation("rope", rope_utils._apply_rotary_pos_emb_bshd, kind)
    return platform


def start_world(
    platform: Platform, *, rank: int, world_size: int, init_method: str, timeout_seconds: float = 600.0
) -> None:
    """Joins the torch.distributed world of the group; its collectives fail after ``timeout_seconds``.

    Args:
        init_method: ``tcp://host:port`` of rank 0, which listens at this address only; or a file, as ``file://path``.
    """
    timeout = datetime.timedelta(seconds=timeout_seconds)
    url = urlsplit(init_method)
    store = None
    if url.scheme == "tcp":
        host = url.hostname or ""
        port = url.port or 0
        store = serve_store(host, port) if rank == 0 else TCPStore(host, port, is_master=False, timeout=timeout)
        store.set_timeout(timeout)
    dist.init_process_group(
        platform.backend,
        init_method=init_method if store is None else None,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    from megatron.core import parallel_state

    # Scratch memory of sequence parallelism: the only global state of Megatron's that is set.
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
