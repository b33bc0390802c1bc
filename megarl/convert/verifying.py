"""Compares a checkpoint with a Hugging Face directory: its tensors, bit for bit, and its logits."""

from __future__ import annotations

import math
import multiprocessing
import tempfile
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from megarl.convert.blocks import Block, group_blocks, plan_blocks, sources_of
from megarl.convert.find_checkpoint import FoundCheckpoint, find_checkpoint
from megarl.convert.hf_source import open_hf, read_spec
from megarl.convert.megatron_checkpoint import MegatronCheckpoint
from megarl.convert.resources import Resources
from megarl.convert.stored import BoxReader, Stored, StoredTensor
from megarl.convert.write_task import task_bytes
from megarl.errors import UsageError
from megarl.models import model_spec
from megarl.types import Layout, RoleName
from megarl.weights.hf_files import read_config
from megarl.weights.shard_map import ShardMap

SEQUENCES = 4
TOKENS = 48
TOLERANCE = 1e-4
"""Of logits, relative to the largest; float32 in two orders of summation differs by about 1e-6 per layer."""
_STRIP = 1 << 16
"""Elements that are compared at a time."""
_BLOCK_BYTES = 64 << 20


def compare(
    hf: Path,
    checkpoint: Path,
    *,
    resources: Resources,
    role: RoleName | None = None,
    step: int | None = None,
    dtype: str | None = None,
    allow_pickle: bool = False,
) -> tuple[int, list[str]]:
    """Compares every tensor of a directory with a checkpoint's; returns their number, and a line for each difference.

    Args:
        checkpoint, role, step: see ``find_checkpoint``.
        dtype: to which both sides are cast; otherwise a tensor of another dtype differs.
        allow_pickle: read ``pytorch_model.bin`` where there is no safetensors file.
    """
    found = find_checkpoint(checkpoint, role=role, step=step)
    spec = read_spec(hf)
    head = found.head(spec.head)
    if (head == "lm") != (spec.head == "lm"):
        kinds = ("a language model", "a model with scores")[:: 1 if spec.head == "lm" else -1]
        raise UsageError(f"{hf} is {kinds[0]}, the {found.role} {kinds[1]}; choose another --role")
    original = open_hf(hf, spec.manifest(head), allow_pickle=allow_pickle)
    found.verify()
    converted = MegatronCheckpoint.open(found, spec, head)
    dtypes = {name: (info.dtype, original[name].info.dtype) for name, info in converted.tensors.items()}
    problems = [f"{name}: {a}, not {b}" for name, (a, b) in dtypes.items() if a != b and not dtype]
    tensors = {name: replace(tensor.info, dtype=dtype or tensor.info.dtype) for name, tensor in original.items()}
    target = ShardMap.identity(tensors)
    block_bytes = resources.block_bytes(len(tensors), 2 * target.nbytes) // 2  # of either side
    blocks = plan_blocks(converted.map, target, block_bytes)
    tasks: list[_CompareTask] = []
    for group in group_blocks(blocks, task_bytes(target.nbytes)):
        sources = sources_of(group, converted.stored)
        expected = {b.target: original[b.target] for b in group}
        tasks.append(_CompareTask(blocks=group, converted=sources, original=expected, scratch_bytes=block_bytes))
    counts: Counter[str] = Counter()
    largest: dict[str, float] = {}
    for _, differences in resources.run(f"verify {checkpoint.name}", tasks, _CompareTask.run):
        for name, count, difference in differences:
            counts[name] += count
            largest[name] = max(largest.get(name, 0.0), difference)
    problems += [
        f"{name}: {counts[name]} of {math.prod(info.shape)} elements differ, by {largest[name]:.3g} at most"
        for name, info in tensors.items()
        if counts[name]
    ]
    return len(tensors), problems


@dataclass(frozen=True, kw_only=True)
class _CompareTask:
    """Blocks of the directory (``original``) and the checkpoint (``converted``) that a worker compares."""

    blocks: tuple[Block, ...]
    converted: Mapping[str, Stored]
    original: Mapping[str, StoredTensor]
    scratch_bytes: int

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    def run(self) -> list[tuple[str, int, float]]:
        """Returns, by block that differs, its tensor, the number of differences, and the largest finite one."""
        differences: list[tuple[str, int, float]] = []
        with BoxReader(self.scratch_bytes) as reader:
            for block in self.blocks:
                values = block.read(self.converted, reader)
                expected = torch.empty_like(values)
                reader.read(self.original[block.target], block.box, expected)
                if not torch.equal(_bits(values), _bits(expected)):
                    differences.append((block.target, *_difference(values, expected)))
        return differences


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Returns the values as integers: NaNs are equal to themselves, zeros of different signs are not."""
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize])


def _difference(values: torch.Tensor, expected: torch.Tensor) -> tuple[int, float]:
    count = 0
    largest = 0.0
    for a, b in zip(values.flatten().split(_STRIP), expected.flatten().split(_STRIP), strict=True):
        count += int((_bits(a) != _bits(b)).sum())
        largest = max(largest, float((a.double() - b.double()).abs().nan_to_num(0.0, 0.0).max()))
    return count, largest


def compare_logits(
    hf: Path, checkpoint: Path, *, role: RoleName | None = None, step: int | None = None
) -> tuple[bool, str]:
    """Returns whether the logits agree up to rounding, and a report; see ``find_checkpoint`` for the arguments.

    Runs both models on random sequences, in float32, one after the other; each must fit into memory.
    """
    found = find_checkpoint(checkpoint, role=role, step=step)
    spec = read_spec(hf)
    if found.head(spec.head) != "lm":
        raise UsageError("--logits compares language models; leave it out for models with a value or score head")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(spec.dims.vocab, (SEQUENCES, min(TOKENS, spec.dims.positions)), generator=generator)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        megatron = torch.from_numpy(pool.submit(_megatron_logits, found, hf, tokens.numpy()).result())
    expected = _transformers_logits(hf, tokens)
    largest = float((megatron - expected).abs().max())
    scale = float(expected.abs().max())
    agree = largest <= TOLERANCE * max(1.0, scale)
    verdict = "agree" if agree else "DISAGREE"
    return agree, (
        f"the logits of transformers and of Megatron {verdict} in float32 on {SEQUENCES} random "
        f"sequences: they differ by {largest:.2e} at most, of {scale:.3g} (tolerance: {TOLERANCE:g} of it)"
    )


@torch.inference_mode()
def _transformers_logits(hf: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Returns [sequences, tokens, vocabulary] float32."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)(tokens).logits


@torch.inference_mode()
def _megatron_logits(found: FoundCheckpoint, hf: Path, tokens: np.ndarray) -> np.ndarray:
    """Returns [sequences, tokens, vocabulary] float32, of the checkpoint's weights."""
    from megarl.data.packing import PackShape
    from megarl.megatron.attention import PackParams
    from megarl.megatron.model import build_model
    from megarl.megatron.parallel import GroupCache, build_groups
    from megarl.megatron.platform import start_platform, start_world

    spec = model_spec(read_config(hf), dtype="float32")
    layout = Layout()
    platform = start_platform("cpu")
    with tempfile.TemporaryDirectory() as directory:  # for its rendezvous
        start_world(platform, rank=0, world_size=1, init_method=f"file://{directory}/store")
        groups = build_groups(layout, 0, GroupCache())
    model = build_model(spec, layout, groups, head="lm", dtype=torch.float32, trainable=False)
    parameters = model.parameters()
    source = MegatronCheckpoint.open(found, spec, "lm")
    with BoxReader(_BLOCK_BYTES) as reader:
        for block in plan_blocks(source.map, spec.megatron_map(layout, 0), _BLOCK_BYTES):
            parameters[block.target][block.box.slices] = block.read(source.stored, reader)
    sequences, length = tokens.shape
    shape = PackShape(cu_seqlens=np.arange(sequences + 1, dtype=np.int32) * length, max_seqlen=length)
    params = PackParams.of(shape, platform.device)
    (chunk,) = model.chunks
    hidden = chunk(torch.from_numpy(tokens).reshape(1, -1), None, None, packed_seq_params=params)
    logits = hidden.squeeze(1) @ chunk.output_weight().T
    return logits[:, : spec.dims.vocab].reshape(sequences, length, -1).numpy()
