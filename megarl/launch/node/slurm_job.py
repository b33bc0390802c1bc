"""A Slurm task: its node's place in the job, its GPUs, and the environment for its processes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")
_PART = re.compile(r"\[([^\]]*)\]|([^\[\]]+)")
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_DEVICE_FILE = re.compile(r"nvidia\d+")

_TASK = "describes the agent's task, one per node; the run's processes have other ranks"
_TORCHRUN = "torch and Megatron would read it as a rank that torchrun has set"
_MPI = "MPI libraries would take the process for a rank, and wait for its launcher"
_OTHER_RAY = "names a Ray cluster of the user who submitted the job"

CLEARED: Final[Mapping[str, str]] = {
    r"SLURM_(?!JOB_ID$|RESTART_COUNT$|JOB_END_TIME$)\w+": _TASK,
    r"SRUN_\w+": _TASK,
    r"(LOCAL_|GROUP_|ROLE_|NODE_)?RANK": _TORCHRUN,
    r"(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE": _TORCHRUN,
    r"MASTER_(ADDR|PORT)": _TORCHRUN,
    r"TORCHELASTIC_\w+": _TORCHRUN,
    r"PMIX?\d?_\w+": _MPI,
    r"(OMPI|OPAL|ORTE|PRTE|I_MPI|MPI|MPICH|MV2|HYDRA|HYDI|PALS)_\w+": _MPI,
    r"RAY_(ADDRESS|NAMESPACE|JOB_\w+|RUNTIME_ENV\w*|TMPDIR)": _OTHER_RAY,
}
"""Patterns of environment variables that the run's processes do not get, and why."""
_CLEARED = re.compile("|".join(CLEARED))


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A task's place in its job.

    Args:
        attempt: number of times that Slurm started the job before.
        nodes: names of the nodes, by the rank of their tasks.
        launcher: address of the host on which srun runs, if Slurm sets it.
    """

    id: int
    attempt: int
    step: str
    index: int
    nodes: tuple[str, ...]
    launcher: str | None

    @property
    def name(self) -> str:
        return self.nodes[self.index]

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> SlurmJob:
        """Reads the variables of srun. Raises ValueError if they do not describe one task per node."""
        try:
            job = cls(
                id=int(environment["SLURM_JOB_ID"]),
                attempt=int(environment.get("SLURM_RESTART_COUNT", "0")),
                step=environment.get("SLURM_STEP_ID", "0"),
                nodes=tuple(expand_nodelist(environment["SLURM_STEP_NODELIST"])),
                index=int(environment["SLURM_NODEID"]),
                launcher=environment.get("SLURM_LAUNCH_NODE_IPADDR"),
            )
            tasks = int(environment["SLURM_NTASKS"])
        except KeyError as missing:
            fix = "start the node agent in a Slurm job, with srun --ntasks-per-node=1"
            raise ValueError(f"{missing.args[0]} is not set: {fix}") from None
        nodes = len(job.nodes)
        if tasks != nodes:
            fix = "start it with srun --ntasks-per-node=1"
            raise ValueError(f"the step has {tasks} tasks on {nodes} nodes: {fix}")
        return job


def expand_nodelist(nodelist: str) -> Iterator[str]:
    """Expands a list such as ``n[1-3,7],gpu-a[01-02]``; containers lack `scontrol show hostnames`."""
    for item in _ITEM.findall(nodelist):
        names = [""]
        for ranges, text in _PART.findall(item):
            choices = _numbers(ranges) if ranges else [text]
            names = [name + choice for name in names for choice in choices]
        yield from names


def _numbers(ranges: str) -> list[str]:
    """Expands ``1-3,7``, with leading zeros as written."""
    numbers: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            numbers.append(str(number).zfill(len(first)))
    return numbers


def missing_gpus(wanted: int, environment: Mapping[str, str], devices: Path = Path("/dev")) -> str | None:
    """Returns which GPUs are missing and how to request them, or None; loads no CUDA library."""
    visible = environment.get(_VISIBLE)
    if visible is None:
        count = sum(_DEVICE_FILE.fullmatch(entry.name) is not None for entry in devices.iterdir())
        found = f"{count} in {devices}"
    else:
        count = len(set(visible.split(",")) - {"", "NoDevFiles"})  # Slurm's word for none
        found = f"{count}, as {_VISIBLE}={visible}"
    if count >= wanted:
        return None
    fix = f"request them, as with --gpus-per-node={wanted}"
    return f"it has {found}, and cluster.devices_per_node is {wanted}: {fix}"


def clean_env(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without variables that would mislead Ray, torch or MPI libraries."""
    return {name: value for name, value in environment.items() if not _CLEARED.fullmatch(name)}
