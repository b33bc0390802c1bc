"""What a checkpoint is and holds, from its index alone."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megarl.convert.dcp import Index, nbytes, read_index
from megarl.convert.locating import Checkpoint, find
from megarl.convert.memory import shown_bytes
from megarl.types import RoleName

COMMON = "common.pt"
_LAYOUT = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "dp": "data_parallel_size",
}
"""Megatron-LM's arguments that say how the writer was laid out."""


def inspect(
    checkpoint: Path, *, role: RoleName | None = None, step: int | None = None, allow_pickle: bool = False
) -> dict[str, Any]:
    """Describes a checkpoint, as plain data.

    Args:
        checkpoint, role, step: as of ``locating.find``.
        allow_pickle: load ``common.pt`` where it holds objects of other programs, which could run code.

    Raises:
        UsageError: there is no checkpoint.
        BrokenError, BrokenCheckpointError: files are missing or damaged.
    """
    found = find(checkpoint, role=role, step=step)
    index = read_index(found.directory)
    grids = _grids(index)
    files = sorted({chunk.place.file for chunk in index.chunks} | {place.file for place in index.objects.values()})
    dtypes: Counter[str] = Counter()
    for info in index.tensors.values():
        dtypes[info.dtype] += nbytes(info)
    return {
        "kind": found.kind,
        "directory": str(found.directory),
        "step": found.step,
        "role": found.role,
        **_common(found, allow_pickle),
        "nbytes": sum(dtypes.values()),
        "dtypes": dict(dtypes),
        "files": {name: (found.directory / name).stat().st_size for name in files},
        "objects": len(index.objects),
        "tensors": {
            key: {"shape": list(info.shape), "dtype": info.dtype, "nbytes": nbytes(info), "grid": grids[key]}
            for key, info in sorted(index.tensors.items())
        },
    }


def report(held: Mapping[str, Any]) -> str:
    """A description for people."""
    when = "release" if held["step"] is None else f"step {held['step']}"
    layout = held["layout"]
    shown = ", ".join(f"{name} {size}" for name, size in layout.items()) if isinstance(layout, dict) else layout
    lines = [
        f"{held['directory']}: {held['kind']}, {when}" + (f", role {held['role']}" if held["role"] else ""),
        f"version: {held['version']}",
        f"written by: {shown}",
        f"{len(held['tensors'])} tensors, {shown_bytes(held['nbytes'])} "
        f"({', '.join(f'{name} {shown_bytes(size)}' for name, size in held['dtypes'].items())}), "
        f"{held['objects']} other objects, {len(held['files'])} files",
    ]
    width = max((len(key) for key in held["tensors"]), default=0)
    for key, info in held["tensors"].items():
        shape, grid = " x ".join(map(str, info["shape"])), " x ".join(map(str, info["grid"]))
        lines.append(f"  {key:{width}}  {info['dtype']:8}  {shape}  in {grid} chunks")
    return "\n".join(lines)


def _grids(index: Index) -> dict[str, list[int]]:
    """Into how many parts each axis of each tensor is cut."""
    starts: dict[str, list[set[int]]] = {key: [set() for _ in info.shape] for key, info in index.tensors.items()}
    for chunk in index.chunks:
        for found, at in zip(starts[chunk.key], chunk.box.start, strict=True):
            found.add(at)
    return {key: [len(axis) for axis in axes] for key, axes in starts.items()}


def _common(found: Checkpoint, allow_pickle: bool) -> dict[str, Any]:
    """The version of a checkpoint, and the layout that wrote it, as far as ``common.pt`` tells."""
    path = found.directory / COMMON
    if not path.is_file():
        return {"version": None, "layout": f"unknown: {COMMON} is missing"}
    try:
        with torch.serialization.safe_globals([Namespace]):
            common = torch.load(path, map_location="cpu", weights_only=not allow_pickle)
    except Exception as error:  # whatever a foreign pickle raises
        reason = str(error).splitlines()[0]
        return {"version": None, "layout": f"unknown: {COMMON} holds other objects; --allow-pickle loads it ({reason})"}
    arguments = vars(common["args"]) if isinstance(common.get("args"), Namespace) else {}
    layout = {short: arguments[name] for short, name in _LAYOUT.items() if arguments.get(name) is not None}
    return {"version": common.get("checkpoint_version"), "layout": layout or "any layout loads it"}
