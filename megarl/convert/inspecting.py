"""Describes a checkpoint from its index alone."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megarl.convert.dcp import DCPIndex
from megarl.convert.find_checkpoint import FoundCheckpoint, find_checkpoint
from megarl.files import format_bytes
from megarl.types import RoleName

_COMMON = "common.pt"
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
    files = {chunk.place.file for chunk in index.chunks} | {place.file for place in index.objects.values()}
    starts: dict[str, list[set[int]]] = {key: [set() for _ in info.shape] for key, info in index.tensors.items()}
    for chunk in index.chunks:
        for axis, at in zip(starts[chunk.key], chunk.box.start, strict=True):
            axis.add(at)
    dtypes: Counter[str] = Counter()
    tensors: dict[str, dict[str, Any]] = {}
    for key, info in index.tensors.items():
        # Any dtype of torch may be there, not only those of weights.
        nbytes = torch.Size(info.shape).numel() * getattr(torch, info.dtype).itemsize
        grid = [len(axis) for axis in starts[key]]
        tensors[key] = {"shape": list(info.shape), "dtype": info.dtype, "nbytes": nbytes, "grid": grid}
        dtypes[info.dtype] += nbytes
    return {
        "kind": found.kind,
        "directory": str(found.directory),
        "step": found.step,
        "role": found.role,
        **_common(found, allow_pickle),
        "nbytes": sum(dtypes.values()),
        "dtypes": dict(dtypes),
        "files": {name: (found.directory / name).stat().st_size for name in sorted(files)},
        "objects": len(index.objects),
        "tensors": dict(sorted(tensors.items())),
    }


def render(found: Mapping[str, Any]) -> str:
    """Returns a description for people to read."""
    when = "release" if found["step"] is None else f"step {found['step']}"
    layout = found["layout"]
    writer = ", ".join(f"{name} {size}" for name, size in layout.items()) if isinstance(layout, dict) else layout
    lines = [
        f"{found['directory']}: {found['kind']}, {when}" + (f", role {found['role']}" if found["role"] else ""),
        f"version: {found['version']}",
        f"written by: {writer}",
        f"{len(found['tensors'])} tensors, {format_bytes(found['nbytes'])} "
        f"({', '.join(f'{name} {format_bytes(size)}' for name, size in found['dtypes'].items())}), "
        f"{found['objects']} other objects, {len(found['files'])} files",
    ]
    width = max((len(key) for key in found["tensors"]), default=0)
    for key, info in found["tensors"].items():
        shape = " x ".join(map(str, info["shape"]))
        grid = " x ".join(map(str, info["grid"]))
        lines.append(f"  {key:{width}}  {info['dtype']:8}  {shape}  in {grid} chunks")
    return "\n".join(lines)


def _common(found: FoundCheckpoint, allow_pickle: bool) -> dict[str, Any]:
    """Returns the version of a checkpoint, and the layout that wrote it, as far as ``common.pt`` has them."""
    path = found.directory / _COMMON
    if not path.is_file():
        return {"version": None, "layout": f"unknown: {_COMMON} is missing"}
    try:
        with torch.serialization.safe_globals([Namespace]):
            common = torch.load(path, map_location="cpu", weights_only=not allow_pickle)
    except Exception as error:  # whatever a foreign pickle raises
        reason = str(error).splitlines()[0]
        return {
            "version": None,
            "layout": f"unknown: {_COMMON} holds other objects; --allow-pickle loads it ({reason})",
        }
    arguments = vars(common["args"]) if isinstance(common.get("args"), Namespace) else {}
    layout = {short: arguments[name] for short, name in _LAYOUT.items() if arguments.get(name) is not None}
    return {"version": common.get("checkpoint_version"), "layout": layout or "any layout loads it"}
