"""The GPUs that a job has on a node, counted without a CUDA library."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_DEVICE = re.compile(r"nvidia\d+")


def lack_of_gpus(wanted: int, environment: Mapping[str, str], devices: Path = Path("/dev")) -> str | None:
    """What is missing, and how to ask for it; None where the node has what is wanted.

    Args:
        wanted: GPUs of the node.
        environment: in which Slurm says which ones are the job's, where it knows of GPUs.
        devices: where the system has a file for each.
    """
    visible = environment.get(_VISIBLE)
    if visible is None:
        names = [entry.name for entry in devices.iterdir() if _DEVICE.fullmatch(entry.name)]
        told = f"{len(names)} in {devices}"
    else:
        names = [name for name in visible.split(",") if name and name != "NoDevFiles"]  # which is Slurm's word for none
        told = f"{len(names)}, as {_VISIBLE}={visible}"
    if len(names) >= wanted:
        return None
    return f"it has {told}, and cluster.devices_per_node is {wanted}: ask for them, as with --gpus-per-node={wanted}"
