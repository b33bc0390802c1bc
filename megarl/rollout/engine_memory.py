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
    """A rank of an engine.

    Args:
        cache: of keys and values; 0 if `rollout.gpu_memory_fraction` leaves no room for it.
        kept: the rest that is there always: on a GPU the CUDA graphs, on a CPU copies and buffers.
        repacked: the largest weight, on a CPU, where a sync packs a new one before the old one is freed.
        work: of the largest batch, while the engine generates; a GPU's allocator keeps it until the engine sleeps.
    """

    weights: int
    cache: int
    kept: int
    repacked: int
    work: int

    @classmethod
    def of(cls, model: ModelSpec, rollout: Rollout, device: str, device_memory: Callable[[], int]) -> EngineRankMemory:
        """Returns the memory of an engine's ranks.

        Args:
            device: `cuda` or `cpu`.
            device_memory: returns all memory of a device; called with `rollout.gpu_memory_fraction` alone.
        """
        params = model.vllm_map(rollout.tp, 0).params
        dims = model.dims
        item = ITEM_BYTES[model.dtype]
        fp8 = rollout.quantization is not None
        quantized = {name for name, info in params.items() if fp8 and "layers." in name and len(info.shape) > 1}
        sizes = [math.prod(i.shape) * (1 if name in quantized else item) for name, i in params.items()]
        weights = sum(sizes)
        repacked = 0 if device == "cuda" else max(sizes)
        tokens, responses = _TOKENS[device]
        # Of an MLP on a CPU: gate and up, the gate's SiLU, the product; residual, norm, input, output.
        batch = tokens * item * 4 * (dims.hidden + dims.ffn // rollout.tp)
        if device == "cuda":
            kept = 0 if rollout.enforce_eager else _GRAPHS
            work = batch + 12 * responses * dims.vocab  # logits, and counts for penalties (0.32)
        else:
            # The output layer is packed into a copy (UnquantizedEmbeddingMethod) if oneDNN can multiply its dtype here:
            # float32 on all x86, 16 bits with AVX-512. Counted always. The runner has a buffer for the embeddings of a
            # batch (GPUModelRunner.inputs_embeds).
            kept = (dims.padded_vocab("vllm", rollout.tp) // rollout.tp + tokens) * dims.hidden * item
            # Logits and log-probabilities; for top-p, logits, sorted ones, int64 indices, sums and a mask.
            logits = (8 if rollout.top_p == 1 else 21) * responses * dims.vocab
            work = max(batch, logits)
        cache = _CACHE if rollout.kv_cache_mib is None else rollout.kv_cache_mib * _MIB
        if rollout.gpu_memory_fraction is not None:
            cache = int(rollout.gpu_memory_fraction * device_memory()) - weights - kept - work - PROCESS
        return cls(weights=weights, cache=max(0, cache), kept=kept, repacked=repacked, work=work)


def cache_bytes(model: ModelSpec, rollout: Rollout, device: str, device_memory: int | None = None) -> int:
    """Returns the size of the cache of an engine that starts in this process; raises ValueError without room for it.

    It follows from the sizes that the memory plan knows: a measurement would differ between starts, and count what a
    trainer on the device allocates meanwhile.

    Args:
        device_memory: all memory of the device; None asks the system.
    """
    cache = EngineRankMemory.of(model, rollout, device, lambda: device_memory or _system_memory(device)).cache
    if cache == 0:
        raise ValueError(f"rollout.gpu_memory_fraction = {rollout.gpu_memory_fraction} leaves no cache: raise it")
    return cache


def _system_memory(device: str) -> int:
    """Returns all memory of this process's first GPU, or of the machine."""
    if device == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    from vllm.platforms import current_platform

    return current_platform.get_device_total_memory()
