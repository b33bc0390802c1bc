"""What Slurm tells a task of the job and step that it belongs to."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")
_PART = re.compile(r"\[([^\]]*)\]|([^\[\]]+)")


class NoSlurmJobError(ValueError):
    """This process is no task of a Slurm step, or of one that has other than one task on each node."""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A task's place in its job; in a heterogeneous job's step the nodes of all components count, one after the other.

    Args:
        id: of the job, of a heterogeneous one its first component's.
        attempt: how often Slurm has started the job before.
        index: of this node; the head is 0.
        components: names of the nodes; those of a heterogeneous job by component, of any other job together.
        launcher: address of the host that started the step, where Slurm tells it.
    """

    id: int
    attempt: int
    index: int
    components: tuple[tuple[str, ...], ...]
    launcher: str | None

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of all nodes, by index."""
        return tuple(itertools.chain.from_iterable(self.components))

    @property
    def name(self) -> str:
        """Of this node."""
        return self.nodes[self.index]

    @property
    def heads(self) -> tuple[str, ...]:
        """Where the head may be reached: a batch job's step is started on its first node; else by that node's name."""
        return (self.launcher, self.nodes[0]) if self.launcher else (self.nodes[0],)

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> SlurmJob:
        """Reads the variables that srun sets.

        Raises:
            NoSlurmJobError: they are not there, or do not describe one task on each node.
        """
        try:
            number = int(environment["SLURM_JOB_ID"])
            components = tuple(_components(environment))
            index = int(environment["SLURM_NODEID"])
            tasks = int(environment["SLURM_NTASKS"])
        except KeyError as missing:
            raise NoSlurmJobError(
                f"{missing.args[0]} is not set: start the node agent in a Slurm job, with srun --ntasks-per-node=1"
            ) from None
        job = cls(
            id=number,
            attempt=int(environment.get("SLURM_RESTART_COUNT", "0")),
            index=index,
            components=components,
            launcher=environment.get("SLURM_LAUNCH_NODE_IPADDR"),
        )
        if tasks != len(job.nodes):
            raise NoSlurmJobError(
                f"the step has {tasks} tasks on {len(job.nodes)} nodes: start it with srun --ntasks-per-node=1"
            )
        return job


def _components(environment: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """The names of the step's nodes; in a heterogeneous job the step's own list is sorted, and not in their order."""
    count = int(environment.get("SLURM_HET_SIZE", "0"))
    names = [f"SLURM_JOB_NODELIST_HET_GROUP_{number}" for number in range(count)] or ["SLURM_STEP_NODELIST"]
    for name in names:
        yield tuple(expanded(environment[name]))


def expanded(nodelist: str) -> Iterator[str]:
    """The names that a list such as ``n[1-3,7],gpu-a[01-02]`` stands for, in its order."""
    for item in _ITEM.findall(nodelist):
        parts = [_alternatives(ranges) if ranges else [text] for ranges, text in _PART.findall(item)]
        yield from map("".join, itertools.product(*parts))


def _alternatives(ranges: str) -> list[str]:
    """The numbers of ``1-3,7``, with the zeros that their first ones lead with."""
    numbers: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return numbers
