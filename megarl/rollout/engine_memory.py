"""The memory of a rank of a vLLM engine: exact weights and cache, and an allowance for the rest, bytes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from megarl.config.schema import Rollout
from megarl.models import ModelSpec
from megarl.weights.shard_map import ITEM_BYTES

_MIB = 1 << 20
_GIB = 1 << 30
_CACHE = 4 * _GIB
_TOKENS = {"cuda": (16384, 1024), "cpu": (4096, 256)}
"""Tokens of a batch of vLLM and responses at once, its defaults (0.32)."""
_GRAPHS = _GIB
"""Allowance for vLLM's CUDA graphs."""
PROCESS: Final = 6 * _GIB // 10
"""Allowance of a process: CUDA's context and NCCL on a GPU, Python and libraries on a CPU."""


@dataclass(frozen=True, kw_only=True)
class EngineRankMemory:
    """Memory of a rank of an engine, bytes.

    Args:
        cache: cache of keys and values; 0 if `rollout.gpu_memory_fraction` leaves no room for it.
        kept: rest that is always there: on a GPU the CUDA graphs, on a CPU copies and buffers.
        repacked: largest weight, on a CPU, where a sync packs a new one before the old one is
            freed.
        work: memory of the largest batch, while the engine generates; a GPU's allocator keeps it
            until the engine sleeps.
    """

    weights: int
    cache: int
    kept: int
    repacked: int
    work: int

    @classmethod
    def of(cls, model: ModelSpec, rollout: Rollout, device: str, device_memory: Callable[[], int]) -> EngineRankMemory:
        """Returns the memory of an engine's ranks; `device_memory` is called only with a fraction of it."""
        params = model.vllm_map(rollout.tp, 0).params
        dims = model.dims
        item = ITEM_BYTES[model.dtype]
        sizes: list[int] = []
        for name, info in params.items():
            is_matrix = "layers." in name and len(info.shape) > 1
            is_quantized = rollout.quantization is not None and is_matrix  # to FP8
            sizes.append(math.prod(info.shape) * (1 if is_quantized else item))
        weights = sum(sizes)
        tokens, responses = _TOKENS[device]
        # Of an MLP on a CPU: gate and up, the gate's SiLU, the product; residual, norm, input, output.
        batch = tokens * item * 4 * (dims.hidden + dims.ffn // rollout.tp)
        if device == "cuda":
            repacked = 0
            kept = 0 if rollout.enforce_eager else _GRAPHS
            work = batch + 12 * responses * dims.vocab  # logits, and counts for penalties (0.32)
        else:
            repacked = max(sizes)
            # The output layer is packed into a copy (UnquantizedEmbeddingMethod) if oneDNN can multiply its
            # dtype here: float32 on all x86, 16 bits with AVX-512. Counted always. The runner has a buffer for
            # the embeddings of a batch (GPUModelRunner.inputs_embeds).
            rows = dims.padded_vocab("vllm", rollout.tp) // rollout.tp + tokens
            kept = rows * dims.hidden * item
            # Logits and log-probabilities; for top-p, logits, sorted ones, int64 indices, sums and a mask.
            logits = (8 if rollout.top_p == 1 else 21) * responses * dims.vocab
            work = max(batch, logits)
        if rollout.gpu_memory_fraction is not None:
            total = int(rollout.gpu_memory_fraction * device_memory())
            cache = max(0, total - weights - kept - work - PROCESS)
        elif rollout.kv_cache_mib is not None:
            cache = rollout.kv_cache_mib * _MIB
        else:
            cache = _CACHE
        return cls(weights=weights, cache=cache, kept=kept, repacked=repacked, work=work)


def cache_bytes(model: ModelSpec, rollout: Rollout, device: str, device_memory: int | None = None) -> int:
    """Returns the size of the cache of an engine that starts in this process; raises ValueError without room.

    It follows from the sizes that the memory plan knows: a measurement would differ between starts,
    and count what a trainer on the device allocates meanwhile.

    Args:
        device_memory: all memory of the device; None reads it from the system.
    """

    def memory() -> int:
        return device_memory or _system_memory(device)

    cache = EngineRankMemory.of(model, rollout, device, memory).cache
    if cache == 0:
        fraction = rollout.gpu_memory_fraction
        raise ValueError(f"rollout.gpu_memory_fraction = {fraction} leaves no cache: raise it")
    return cache


def _system_memory(device: str) -> int:
    """Returns all memory of this process's first GPU, or of the machine."""
    if device == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    from vllm.platforms import current_platform

    return current_platform.get_device_total_memory()
