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
    """The memory of a device; of all ``machines`` together where devices are virtual, and share it."""

    nbytes: int
    source: str
    shared: bool = False
    machines: int = 1

    @property
    def of_device(self) -> int:
        """What a fraction of a device's memory is a fraction of: of its machine's, if it is virtual."""
        return self.nbytes // self.machines


def capacity(config: RunConfig) -> Capacity:
    """Returns the memory of a device: as configured, of this machine's, or else of the largest GPU there is."""
    cluster = config.cluster
    shared = cluster.device == "cpu"
    if cluster.device_memory_gib is not None:
        nbytes = int(cluster.device_memory_gib * _GIB)
        return Capacity(nbytes=nbytes, source="cluster.device_memory_gib", shared=shared)
    if shared:
        machines = 1 if cluster.is_here else cluster.nodes
        nbytes = machines * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        source = "this machine" if machines == 1 else "machines like this"
        return Capacity(nbytes=nbytes, source=source, shared=True, machines=machines)
    gpu = _first_gpu() if cluster.is_here else None
    return gpu or Capacity(nbytes=_LARGEST, source="the largest GPU there is; set cluster.device_memory_gib")


def _first_gpu() -> Capacity | None:
    """Returns the first GPU of this machine; asks without torch, which would start CUDA."""
    query = ["nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits", "--id=0"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
        mib, name = answer.strip().split(", ", 1)
        return Capacity(nbytes=int(mib) << 20, source=name)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
