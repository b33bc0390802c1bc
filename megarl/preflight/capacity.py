"""The memory of the devices that a run is planned for."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

from megarl.config import RunConfig

_GIB = 1 << 30
_LARGEST = 268 * _GIB
"""Memory of the largest GPU, a B300."""


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The memory of a device; of all machines together where devices are virtual, and share it.

    Args:
        device_bytes: memory of which a fraction of a device is a part; of one
            machine, if devices are virtual.
        known: whether `nbytes` is more than a guess.
    """

    nbytes: int
    source: str
    device_bytes: int
    shared: bool
    known: bool


def capacity(config: RunConfig) -> Capacity:
    """Returns the memory of a device: as configured, this machine's, or that of the largest GPU."""
    cluster = config.cluster
    shared = cluster.device == "cpu"
    machines = 1
    known = True
    nbytes = _LARGEST
    source = "the largest GPU there is; set cluster.device_memory_gib"
    if cluster.device_memory_gib is not None:
        nbytes = int(cluster.device_memory_gib * _GIB)
        source = "cluster.device_memory_gib"
    elif shared:
        nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        source = "this machine"
        if not cluster.is_here and cluster.nodes > 1:
            machines = cluster.nodes
            source = "machines like this"
    elif cluster.is_here and (gpu := _first_gpu()):
        nbytes, source = gpu
    else:
        known = False
    return Capacity(nbytes=machines * nbytes, source=source, device_bytes=nbytes, shared=shared, known=known)


def _first_gpu() -> tuple[int, str] | None:
    """Returns memory and name of the first GPU; asks without torch, which would start CUDA."""
    query = ["nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits", "--id=0"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
        mib, name = answer.strip().split(", ", 1)
        return int(mib) << 20, name
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
