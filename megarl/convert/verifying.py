"""Compares the tensors of a checkpoint with those of a Hugging Face directory, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from megarl.convert.assembly import Assembly, copy_values
from megarl.convert.find_checkpoint import find_checkpoint
from megarl.convert.megatron_checkpoint import MegatronCheckpoint
from megarl.convert.resources import Resources, run_tasks
from megarl.convert.stored import Stored, open_hf, read_spec
from megarl.errors import UsageError
from megarl.types import RoleName
from megarl.weights.export import group_tensors
from megarl.weights.shard_map import TensorInfo

_GROUP_BYTES = 256 << 20
_STRIP = 1 << 16
"""Elements that are compared at a time."""


def compare(
    hf: Path,
    checkpoint: Path,
    *,
    resources: Resources,
    role: RoleName | None = None,
    step: int | None = None,
    dtype: str | None = None,
) -> tuple[int, list[str]]:
    """Compares every tensor of a directory with a checkpoint's; returns their number, and a line for each difference.

    Args:
        checkpoint, role, step: see ``find_checkpoint``.
        dtype: dtype to which both sides are cast; otherwise a tensor of another dtype differs.
    """
    found = find_checkpoint(checkpoint, role=role, step=step)
    spec = read_spec(hf)
    head = found.head(spec.head)
    if (head == "lm") != (spec.head == "lm"):
        raise UsageError(f"{hf} has the head {spec.head!r}, the {found.role} {head!r}; choose another --role")
    original = open_hf(hf, spec.manifest(head))
    found.verify()
    converted = MegatronCheckpoint.open(found, spec, head)
    problems: list[str] = []
    tensors: dict[str, TensorInfo] = {}
    for name, tensor in original.items():
        info = converted.tensors[name]
        if dtype is None and info.dtype != tensor.info.dtype:
            problems.append(f"{name}: {info.dtype}, not {tensor.info.dtype}")
        tensors[name] = replace(tensor.info, dtype=dtype or tensor.info.dtype)
    tasks: list[tuple[Assembly, Mapping[str, Stored]]] = []
    for assembly in converted.assemble(group_tensors(tensors, _GROUP_BYTES)):
        tasks.append((assembly, {name: original[name] for name in assembly.tensors}))
    workers = resources.workers([assembly.memory for assembly, _ in tasks])
    for _, differences in run_tasks(tasks, _differences, workers):
        problems += differences
    return len(tensors), problems


def _differences(task: tuple[Assembly, Mapping[str, Stored]]) -> list[str]:
    """Returns a line for each tensor that differs."""
    converted, original = task
    differences: list[str] = []
    tensors = converted.read()
    for name, source in original.items():
        values = tensors.pop(name)
        count = _count_differences(values, source)
        if count:
            differences.append(f"{name}: {count} of {values.numel()} elements differ")
    return differences


def _count_differences(values: torch.Tensor, source: Stored) -> int:
    """Returns the number of elements with other bits: equal NaNs are equal, zeros of two signs are not."""
    expected = torch.empty_like(values)
    copy_values(source.read_rows(0, source.info.shape[0]), expected, source.path)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize]
    parts = [tensor.view(integers).flatten().split(_STRIP) for tensor in (values, expected)]
    return sum(int((left != right).sum()) for left, right in zip(*parts, strict=True))
