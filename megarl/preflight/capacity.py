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
    """

    nbytes: int
    source: str
    device_bytes: int
    shared: bool = False


def capacity(config: RunConfig) -> Capacity:
    """Returns the memory of a device: as configured, this machine's, or that of the largest GPU."""
    cluster = config.cluster
    shared = cluster.device == "cpu"
    if cluster.device_memory_gib is not None:
        nbytes = int(cluster.device_memory_gib * _GIB)
        return Capacity(nbytes=nbytes, source="cluster.device_memory_gib", device_bytes=nbytes, shared=shared)
    if shared:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if cluster.is_here or cluster.nodes == 1:
            return Capacity(nbytes=machine, source="this machine", device_bytes=machine, shared=True)
        nbytes = cluster.nodes * machine
        return Capacity(nbytes=nbytes, source="machines like this", device_bytes=machine, shared=True)
    gpu = _first_gpu() if cluster.is_here else None
    source = "the largest GPU there is; set cluster.device_memory_gib"
    return gpu or Capacity(nbytes=_LARGEST, source=source, device_bytes=_LARGEST)


def _first_gpu() -> Capacity | None:
    """Returns the first GPU of this machine; asks without torch, which would start CUDA."""
    query = ["nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits", "--id=0"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
        mib, name = answer.strip().split(", ", 1)
        nbytes = int(mib) << 20
        return Capacity(nbytes=nbytes, source=name, device_bytes=nbytes)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
