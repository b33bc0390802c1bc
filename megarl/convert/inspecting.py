"""Describes a checkpoint from its index alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megarl.convert.dcp import DCPIndex
from megarl.convert.find_checkpoint import find_checkpoint
from megarl.files import format_bytes
from megarl.types import RoleName


def inspect(checkpoint: Path, *, role: RoleName | None = None, step: int | None = None) -> dict[str, Any]:
    """Describes a checkpoint, as plain data; see ``find_checkpoint`` for the arguments."""
    found = find_checkpoint(checkpoint, role=role, step=step)
    index = DCPIndex.read(found.directory)
    chunks = Counter(chunk.key for chunk in index.chunks)
    dtypes: Counter[str] = Counter()
    tensors: dict[str, dict[str, Any]] = {}
    for key, info in sorted(index.tensors.items()):
        # Any dtype of torch may be there, not only those of weights.
        nbytes = torch.Size(info.shape).numel() * getattr(torch, info.dtype).itemsize
        tensors[key] = {
            "shape": list(info.shape),
            "dtype": info.dtype,
            "nbytes": nbytes,
            "chunks": chunks[key],
        }
        dtypes[info.dtype] += nbytes
    return {
        "kind": found.kind,
        "directory": str(found.directory),
        "step": found.step,
        "role": found.role,
        "nbytes": sum(dtypes.values()),
        "dtypes": dict(dtypes),
        "tensors": tensors,
    }


def render(found: Mapping[str, Any]) -> str:
    """Returns a description for people to read: a line for each field, and one for each tensor."""
    fields = {**found, "nbytes": format_bytes(found["nbytes"]), "tensors": len(found["tensors"])}
    lines = [f"{name}: {value}" for name, value in fields.items()]
    for key, info in found["tensors"].items():
        lines.append(f"  {key}  {info['dtype']}  {info['shape']}  chunks: {info['chunks']}")
    return "\n".join(lines)
