"""Describes a checkpoint from its index alone."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megarl.convert.dcp import DCPIndex
from megarl.convert.find_checkpoint import find_checkpoint
from megarl.files import format_bytes
from megarl.types import RoleName

_LAYOUT = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "dp": "data_parallel_size",
}
"""Megatron-LM's arguments with the layout of the writer."""


def inspect(
    checkpoint: Path, *, role: RoleName | None = None, step: int | None = None, allow_pickle: bool = False
) -> dict[str, Any]:
    """Describes a checkpoint, as plain data.

    Args:
        checkpoint, role, step: see ``find_checkpoint``.
        allow_pickle: load ``common.pt`` where it holds objects of other programs, which could run code.
    """
    found = find_checkpoint(checkpoint, role=role, step=step)
    index = DCPIndex.read(found.directory)
    chunks = Counter(chunk.key for chunk in index.chunks)
    dtypes: Counter[str] = Counter()
    tensors: dict[str, dict[str, Any]] = {}
    for key, info in sorted(index.tensors.items()):
        # Any dtype of torch may be there, not only those of weights.
        nbytes = torch.Size(info.shape).numel() * getattr(torch, info.dtype).itemsize
        tensors[key] = {"shape": list(info.shape), "dtype": info.dtype, "nbytes": nbytes, "chunks": chunks[key]}
        dtypes[info.dtype] += nbytes
    return {
        "kind": found.kind,
        "directory": str(found.directory),
        "step": found.step,
        "role": found.role,
        **_common(found.directory / "common.pt", allow_pickle),
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


def _common(path: Path, allow_pickle: bool) -> dict[str, Any]:
    """Returns the version of a checkpoint, and the layout that wrote it, as far as ``common.pt`` has them."""
    if not path.is_file():
        return {"version": None, "layout": f"unknown: {path.name} is missing"}
    try:
        with torch.serialization.safe_globals([Namespace]):
            common = torch.load(path, map_location="cpu", weights_only=not allow_pickle)
    except Exception as error:  # whatever a foreign pickle raises
        reason = str(error).splitlines()[0]
        layout = f"unknown: {path.name} holds other objects; --allow-pickle loads it ({reason})"
        return {"version": None, "layout": layout}
    arguments = vars(common["args"]) if isinstance(common.get("args"), Namespace) else {}
    layout = {short: arguments[name] for short, name in _LAYOUT.items() if arguments.get(name) is not None}
    return {"version": common.get("checkpoint_version"), "layout": layout or "any layout loads it"}
