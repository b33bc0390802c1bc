"""The environment of what an agent starts: the job's own, without what would mislead Ray, torch or an MPI library."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_OF_THE_TASK = "tells of the agent's own task, one per node; the run's processes have ranks of their own"
_OF_TORCHRUN = "torch and Megatron take it for the place of a process that torchrun started"
_OF_MPI = "libraries that look for an MPI take the process for one of its ranks, and wait for its launcher"
_OF_ANOTHER_RAY = "names a Ray of whoever submitted the job"

SCRUBBED: Final[Mapping[str, str]] = {
    r"SLURM_(?!JOB_ID$|RESTART_COUNT$)\w+": _OF_THE_TASK,
    r"SRUN_\w+": _OF_THE_TASK,
    r"(LOCAL_|GROUP_|ROLE_|NODE_)?RANK": _OF_TORCHRUN,
    r"(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE": _OF_TORCHRUN,
    r"MASTER_(ADDR|PORT)": _OF_TORCHRUN,
    r"TORCHELASTIC_\w+": _OF_TORCHRUN,
    r"PMIX?\d?_\w+": _OF_MPI,
    r"(OMPI|OPAL|ORTE|PRTE|I_MPI|MPI|MPICH|MV2|HYDRA|HYDI|PALS)_\w+": _OF_MPI,
    r"RAY_(ADDRESS|NAMESPACE|JOB_\w+|RUNTIME_ENV\w*|TMPDIR)": _OF_ANOTHER_RAY,
}
"""Patterns of the names of variables that are left out, and why."""

_SCRUBBED = re.compile("|".join(SCRUBBED))


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without them."""
    return {name: value for name, value in environment.items() if not _SCRUBBED.fullmatch(name)}
