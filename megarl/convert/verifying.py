"""Compares the tensors of a checkpoint with those of a Hugging Face directory, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from megarl.convert.assembly import Assembly
from megarl.convert.find_checkpoint import find_checkpoint
from megarl.convert.hf_source import open_hf, read_spec
from megarl.convert.megatron_checkpoint import MegatronCheckpoint
from megarl.convert.resources import Resources, run_tasks
from megarl.convert.stored import Stored, copy_values
from megarl.errors import UsageError
from megarl.types import RoleName
from megarl.weights.export import group_tensors
from megarl.weights.shard_map import TensorInfo

_GROUP_BYTES = 256 << 20
_STRIP = 1 << 16
"""Elements whose differences are computed at a time."""

_Task = tuple[Assembly, Mapping[str, Stored]]
"""Tensors of a checkpoint, and those of the directory with which they are compared."""


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
        dtype: dtype to which both sides are cast; otherwise a tensor of another dtype differs.
        allow_pickle: read ``pytorch_model.bin`` where there is no safetensors file.
    """
    found = find_checkpoint(checkpoint, role=role, step=step)
    spec = read_spec(hf)
    head = found.head(spec.head)
    if (head == "lm") != (spec.head == "lm"):
        raise UsageError(f"{hf} has the head {spec.head!r}, the {found.role} {head!r}; choose another --role")
    original = open_hf(hf, spec.manifest(head), allow_pickle=allow_pickle)
    found.verify()
    converted = MegatronCheckpoint.open(found, spec, head)
    problems: list[str] = []
    for name, info in converted.tensors.items():
        expected = original[name].info.dtype
        if dtype is None and info.dtype != expected:
            problems.append(f"{name}: {info.dtype}, not {expected}")
    tensors: dict[str, TensorInfo] = {}
    for name, tensor in original.items():
        tensors[name] = replace(tensor.info, dtype=dtype or tensor.info.dtype)
    tasks: list[_Task] = []
    for assembly in converted.assemble(group_tensors(tensors, _GROUP_BYTES)):
        originals = {name: original[name] for name in assembly.tensors}
        tasks.append((assembly, originals))
    workers = resources.workers([assembly.memory for assembly, _ in tasks])
    for _, differences in run_tasks(tasks, _differences, workers):
        problems += differences
    return len(tensors), problems


def _differences(task: _Task) -> list[str]:
    """Returns a line for each tensor that differs."""
    converted, original = task
    differences: list[str] = []
    tensors = converted.read()
    for name, source in original.items():
        values = tensors.pop(name)
        expected = torch.empty_like(values)
        copy_values(source.read_rows(0, source.info.shape[0]), expected, source.path)
        count, largest = _difference(values, expected)
        if count:
            elements = f"{count} of {math.prod(source.info.shape)} elements"
            differences.append(f"{name}: {elements} differ, by {largest:.3g} at most")
    return differences


def _difference(values: torch.Tensor, expected: torch.Tensor) -> tuple[int, float]:
    """Returns the number of elements with other bits, and the largest finite difference.

    NaNs of the same bits are equal, zeros of different signs are not.
    """
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize]
    count = 0
    largest = 0.0
    strips = zip(values.flatten().split(_STRIP), expected.flatten().split(_STRIP), strict=True)
    for left, right in strips:
        different = int((left.view(integers) != right.view(integers)).sum())
        if different:
            count += different
            distances = (left.double() - right.double()).abs().nan_to_num(0.0, 0.0)
            largest = max(largest, float(distances.max()))
    return count, largest
