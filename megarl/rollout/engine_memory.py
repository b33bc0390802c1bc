"""The memory of a rank of a vLLM engine: exact weights and cache, and an allowance for the rest, bytes."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from megarl.config.schema import Rollout
from megarl.files import format_bytes
from megarl.models import ModelSpec, model_spec
from megarl.models.lora import Adapters, engine_adapter_map
from megarl.rollout.adapter_buffers import largest_rank
from megarl.weights.hf_files import read_config
from megarl.weights.shard_map import ITEM_BYTES

_MIB = 1 << 20
_GIB = 1 << 30
BLOCK_TOKENS: Final = 32
"""Tokens of a block of the cache: the CPU kernels' smallest number; short prompts share prefixes."""
_CACHE = 4 * _GIB
"""Size of a cache that nothing else decides."""
FILLED: Final = 0.95
"""Part of a GPU that a cache fills; the rest is for fragmentation, and for what the plan's allowances miss."""
_TOKENS = {"cuda": (16384, 1024), "cpu": (4096, 256)}
"""Tokens of a batch of vLLM and responses at once, its defaults (0.32)."""
_GRAPHS = _GIB
"""Allowance for vLLM's CUDA graphs."""
PROCESS: Final = 6 * _GIB // 10
"""Allowance of a process: CUDA's context on a GPU, Python and libraries on a CPU."""
WORKSPACE: Final = 32 * _MIB
"""Memory that torch gives cuBLAS on a GPU of compute capability 9, for each thread that multiplies matrices."""


@dataclass(frozen=True, kw_only=True)
class EngineRankMemory:
    """Memory of a rank of an engine, bytes.

    Args:
        cache: cache of keys and values; 0 if `rollout.gpu_memory_fraction` leaves no room for it, and
            where it fills the device, until it is known what else is there (`cache_filling`).
        kept: rest that is always there: on a GPU CUDA graphs, counts of sampled tokens and cuBLAS's
            workspace, on a CPU copies and buffers.
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
    def of(
        cls,
        model: ModelSpec,
        rollout: Rollout,
        device: str,
        device_memory: Callable[[], int],
        adapters: Adapters | None = None,
    ) -> EngineRankMemory:
        """Returns the memory of an engine's ranks; `device_memory` is called only with a fraction of it.

        Args:
            adapters: those that it applies.
        """
        dims = model.dims
        item = ITEM_BYTES[model.dtype]
        sizes = _sizes(model, rollout.tp, quantized=rollout.quantization is not None)
        weights = sum(sizes)
        if adapters is not None:
            buffers = replace(adapters, rank=largest_rank(adapters.rank))
            weights += engine_adapter_map(model, buffers, rollout.tp, 0).nbytes
        if rollout.draft_model is not None:
            weights += sum(_sizes(_draft_model(rollout.draft_model), rollout.tp))
        tokens, responses = _TOKENS[device]
        scored = min(tokens, responses * (1 + rollout.speculative))
        # Of an MLP on a CPU: gate and up, the gate's SiLU, the product; residual, norm, input, output.
        batch = tokens * item * 4 * (dims.hidden + model.widest_mlp // rollout.tp)
        if device == "cuda":
            repacked = 0
            # Of each token of the vocabulary, each response's count, and whether its prompt has it (PenaltiesState,
            # 0.32): outside of the pools that sleep frees.
            counts = responses * (4 * dims.vocab + dims.vocab // 8)
            if rollout.speculative:
                counts += 4 * responses * rollout.positions  # the tokens, from which drafts are looked up
            kept = counts + WORKSPACE + (0 if rollout.enforce_eager else _GRAPHS)
            work = batch + 8 * scored * dims.vocab  # logits
        else:
            repacked = max(sizes)
            # The output layer is packed into a copy (UnquantizedEmbeddingMethod) if oneDNN can multiply its
            # dtype here: float32 on all x86, 16 bits with AVX-512. Counted always. The runner has a buffer for
            # the embeddings of a batch (GPUModelRunner.inputs_embeds).
            rows = dims.padded_vocab("vllm", rollout.tp) // rollout.tp + tokens
            kept = rows * dims.hidden * item
            # Logits and log-probabilities; for top-p, logits, sorted ones, int64 indices, sums and a mask; with
            # drafts, a peak of 21.8 and 22.4 bytes was measured.
            of_each = 8 if rollout.top_p == 1 else 21
            logits = (23 if rollout.speculative else of_each) * scored * dims.vocab
            work = max(batch, logits)
        if rollout.gpu_memory_fraction is not None:
            total = int(rollout.gpu_memory_fraction * device_memory())
            cache = max(0, total - weights - kept - work - PROCESS)
        elif rollout.kv_cache_mib is not None:
            cache = rollout.kv_cache_mib * _MIB
        else:
            cache = 0 if fills_device(rollout, device) else _CACHE
        return cls(weights=weights, cache=cache, kept=kept, repacked=repacked, work=work)


def _sizes(model: ModelSpec, tp: int, *, quantized: bool = False) -> list[int]:
    """Returns the bytes of each parameter of a rank; FP8 where they are quantized."""
    sizes: list[int] = []
    for name, info in model.vllm_map(tp, 0).params.items():
        is_matrix = "layers." in name and len(info.shape) > 1
        sizes.append(math.prod(info.shape) * (1 if quantized and is_matrix else ITEM_BYTES[info.dtype]))
    return sizes


def _draft_model(directory: str) -> ModelSpec:
    return model_spec(read_config(directory))


def fills_device(rollout: Rollout, device: str) -> bool:
    """Returns whether the cache takes the memory that nothing else needs: on a GPU, if no size is configured."""
    return device == "cuda" and rollout.kv_cache_mib is None and rollout.gpu_memory_fraction is None


def cache_filling(model: ModelSpec, rollout: Rollout, device_memory: int | None, besides: int) -> int:
    """Returns the size of a cache that fills a GPU, but for 5 %; 0 if it could not hold one sequence.

    It is not larger than all sequences that vLLM generates at once need at their longest.

    Args:
        device_memory: all memory of the GPU; None: unknown, for a plan, which then counts 4 GiB.
        besides: the most that the GPU holds of other things while it has the cache.
    """
    sequence = sequence_bytes(model, rollout)
    _, sequences = _TOKENS["cuda"]
    free = max(sequence, _CACHE)
    if device_memory is not None:
        free = int(FILLED * device_memory) - besides
    if free < sequence:
        return 0
    return min(free, sequences * sequence)


_DELTA_NET = "delta net"


def sequence_bytes(model: ModelSpec, rollout: Rollout) -> int:
    """Returns what a sequence of the largest length takes of a rank's cache, in whole blocks."""
    models = [model]
    if rollout.draft_model is not None:
        models.append(_draft_model(rollout.draft_model))
    return sum(_longest_bytes(each, rollout) for each in models)


def _longest_bytes(model: ModelSpec, rollout: Rollout) -> int:
    """Returns what one model keeps of a sequence of the largest length, on a rank.

    Attention has a block for each part of the sequence, a delta net one block for all of it. With a window,
    vLLM (0.32) asks for one more, as a sequence may be in flight as a whole.
    """
    positions, block = _block(model, rollout.tp)
    blocks = math.ceil(rollout.positions / positions)
    counts: Counter[object] = Counter()
    for kind in model.table.layers:
        counts[_DELTA_NET if kind.is_delta_net else kind.window] += 1
    # Layers of one kind share blocks in groups, which are padded to one size (vLLM 0.32: ``kv_cache_utils``).
    group = min(counts.values())
    if max(counts.values()) < 1.5 * group:
        group = max(counts.values())
    total = 0
    for kind, layers in counts.items():
        of_layer = blocks
        if kind == _DELTA_NET:
            of_layer = 1
        elif kind is not None:
            of_layer = blocks + 1
        total += math.ceil(layers / group) * group * of_layer
    return block * total


def _block(model: ModelSpec, tp: int) -> tuple[int, int]:
    """Returns the positions of a block and its bytes in one layer, on a rank.

    A block holds the state of a delta net (vLLM 0.32: ``_align_hybrid_block_size``).
    """
    dims = model.dims
    token = 2 * max(1, dims.kv_heads // tp) * dims.head_dim * ITEM_BYTES[model.dtype]
    if dims.mla is not None:
        token = (dims.mla.latent + dims.mla.rotated) * ITEM_BYTES[model.dtype]
    positions = BLOCK_TOKENS
    if dims.delta is not None:
        delta = dims.delta
        channels = 2 * delta.key_heads * delta.key_dim + delta.value_heads * delta.value_dim
        state = 4 * delta.value_heads * delta.key_dim * delta.value_dim
        state += (delta.width - 1) * channels * ITEM_BYTES[model.dtype]
        positions *= max(1, math.ceil(state / tp / token / BLOCK_TOKENS))
    return positions, positions * token


def most_sequences(model: ModelSpec, rollout: Rollout, device: str, cache: int) -> int | None:
    """Returns how many sequences an engine may generate at once; None: vLLM's default.

    vLLM (0.32) does not start graphs of a model with states if its cache has fewer blocks than
    sequences (``config/compilation.py``).

    Args:
        cache: bytes of the cache on a rank.
    """
    if model.dims.delta is None:
        return None
    _, sequences = _TOKENS[device]
    _, block = _block(model, rollout.tp)
    return max(1, min(sequences, cache // (block * model.dims.layers)))


def cache_bytes(
    model: ModelSpec, rollout: Rollout, device: str, device_memory: int | None = None, besides: int = 0
) -> int:
    """Returns the size of the cache of an engine that starts in this process; raises ValueError without room.

    It follows from the sizes that the memory plan knows: a measurement would differ between starts,
    and count what a trainer on the device allocates meanwhile.

    Args:
        device_memory: all memory of the device; None reads it from the system.
        besides: see `cache_filling`.
    """

    def memory() -> int:
        return device_memory or _system_memory(device, rollout.tp)

    if fills_device(rollout, device):
        total = memory()
        cache = cache_filling(model, rollout, total, besides)
        if cache == 0:
            parts = f"{format_bytes(besides)} of {format_bytes(total)} are taken besides"
            raise ValueError(f"the GPU has no room for a cache of one sequence: {parts}; see megarl plan memory")
        return cache
    cache = EngineRankMemory.of(model, rollout, device, memory).cache
    if cache == 0:
        fraction = rollout.gpu_memory_fraction
        raise ValueError(f"rollout.gpu_memory_fraction = {fraction} leaves no cache: raise it")
    return cache


def _system_memory(device: str, tp: int) -> int:
    """Returns all memory of the smallest of this engine's GPUs, or of the machine."""
    if device == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    from vllm.platforms import current_platform

    return min(current_platform.get_device_total_memory(index) for index in range(tp))
