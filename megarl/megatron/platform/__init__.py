"""CPU with Gloo and CUDA with NCCL behind one interface."""

from __future__ import annotations

import datetime
import logging
import os
import warnings
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from megarl.lazy_compiling import absent, compiled_at_first_call
from megarl.megatron.platform.kernels import compiled, transformer_engine_failure
from megarl.megatron.platform.recomputation import mend_recomputation
from megarl.resharding import serve_store


def set_cuda_options(*, tensor_parallel: bool) -> None:
    """Sets options of CUDA and torch's allocator, unless the user has; before CUDA starts.

    Every step packs other lengths: expandable segments keep the allocator's memory from fragmenting.
    Not for processes with an engine: vLLM's sleep has pools of its own.

    Args:
        tensor_parallel: whether a model is split; with one queue on the device, gradients of weights
            start after the collective beside which Megatron computes them.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    if tensor_parallel:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def start_platform(kind: str, *, fused: bool = False) -> torch.device:
    """Imports megatron-core and prepares it for "cuda" or "cpu"; returns the tensors' device.

    Args:
        fused: whether rope is compiled.
    """
    # Megatron warns at import that Transformer Engine and apex are absent, and torch that nvcc is
    # here without a GPU; `megarl doctor` says it better.
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    # It calls collectives by names that torch 2.13 has renamed (0.19).
    logger = r"torch\.distributed\.c10d_logger"
    warnings.filterwarnings("ignore", category=FutureWarning, module=logger)
    logging.getLogger("megatron").setLevel(logging.ERROR)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    # Otherwise Megatron reports the commit of a repository around it (package_info.py, 0.19).
    os.environ["NO_VCS_VERSION"] = "1"
    transformer_engine_failure()
    # Megatron is imported without torch's compiler, and without wandb, of its inference engine.
    with compiled_at_first_call(), absent("wandb"):
        if kind == "cpu":
            from megarl.megatron.platform import cpu

            cpu.install()
            device = torch.device("cpu")
        elif torch.cuda.is_available():
            torch.cuda.set_device(0)
            device = torch.device("cuda", 0)
        else:
            problem = "cluster.device is cuda, but torch sees no CUDA device"
            raise RuntimeError(f"{problem}; set cluster.device=cpu")
        from megatron.core.models.common.embeddings import rope_utils

    mend_recomputation()
    if fused:
        # Rotates queries and keys; Megatron's fused one needs Transformer Engine.
        rope_utils._apply_rotary_pos_emb_bshd = compiled(rope_utils._apply_rotary_pos_emb_bshd)

    def rotate_pack(x: Tensor, _bounds: Tensor, angles: Tensor, *, cp_group: object, **options: Any) -> Tensor:
        """Rotates [S, H, D] by the angles of each position; Megatron would copy them, twice in each layer."""
        assert len(x) == len(angles), "PackedModel looks up each position"
        return rope_utils._apply_rotary_pos_emb_bshd(x.unsqueeze(1), angles, **options).squeeze(1)

    rope_utils._apply_rotary_pos_emb_thd = rotate_pack
    return device


def start_world(
    device: torch.device,
    *,
    rank: int,
    world_size: int,
    init_method: str,
    timeout_seconds: float = 600.0,
) -> None:
    """Joins the torch.distributed world of the group; its collectives fail after ``timeout_seconds``.

    The address ``tcp://host:port`` is the only one at which rank 0 listens.
    """
    timeout = datetime.timedelta(seconds=timeout_seconds)
    url = urlsplit(init_method)
    host = url.hostname or ""
    port = url.port or 0
    if rank == 0:
        store = serve_store(host, port)
    else:
        store = TCPStore(host, port, is_master=False, timeout=timeout)
    store.set_timeout(timeout)
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    from megatron.core import parallel_state

    # Scratch memory of sequence parallelism: the only global state of Megatron that is set.
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
