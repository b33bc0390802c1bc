"""What the command line of a submission asks for, and what in it contradicts itself."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from megarl.config import RunConfig, as_yaml
from megarl.config.problems import KEY, Problem, shown
from megarl.launch.values import PARTITIONS

OPTIONS: Mapping[str, str] = {
    "runtime.name": "--runtime",
    "runtime.image": "--container",
    "runtime.mounts": "--mounts",
    "runtime.python": "--python",
}
"""Options of the command line whose fields of the profile have other names."""


class Way(Enum):
    """How runs get to where they run."""

    SBATCH = auto()
    """Submitted on this machine, to its cluster."""
    TUNNEL = auto()
    """Submitted through the tunnel that the profile has for NeMo-Run."""
    NONE = auto()
    """They run on this machine, without Slurm."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A submission, as it is asked for; what is None is the configuration's, or left to the profile or the cluster.

    Args:
        configs: of the runs: one, or several that follow each other.
        overrides: ``key.path=value``, of every run.
        profile: file of the cluster's profile; None is the user's own.
        settings: fields of the profile that the command line gives.
        nodes: of the job.
        gpus_per_node: of each node.
        job_name: as Slurm shows it.
        dependency: of the first job, as sbatch takes it.
        sweeps: ``key.path=value,value``; every combination is a run.
        parallel: runs of a sweep at the same time.
        rollout_nodes: of the job's nodes, the last ones, which are a component of their own.
        rollout_partition: of that component.
        dry_run: write and show, but do not submit.
        way: how the runs get to where they run.
    """

    configs: tuple[Path, ...]
    overrides: tuple[str, ...] = ()
    profile: Path | None = None
    settings: Mapping[str, object]
    nodes: int | None = None
    gpus_per_node: int | None = None
    job_name: str | None = None
    dependency: str | None = None
    sweeps: tuple[str, ...] = ()
    parallel: int | None = None
    rollout_nodes: int | None = None
    rollout_partition: str | None = None
    dry_run: bool = False
    way: Way = Way.SBATCH

    def contradictions(self) -> Iterator[Problem]:
        """What cannot be asked for together."""
        chain, sweep, split = len(self.configs) > 1, bool(self.sweeps), self.rollout_nodes is not None
        several, sweeps = " ".join(map(str, self.configs)), " ".join(self.sweeps)
        if not self.configs:
            fix = "name the YAML file of the run"
            yield Problem(field="CONFIG", value="(missing)", rule="at least one configuration", fix=fix)
        if chain and sweep:
            fix = "submit the sweep by itself, with --dependency for what it follows"
            yield Problem(field="--sweep", value=shown(sweeps), rule="not of several configurations", fix=fix)
        if split and (chain or sweep):
            what, value = ("several configurations", several) if chain else ("a sweep", sweeps)
            rule = f"one run alone has components; not together with {what}: {value}"
            fix = "submit it by itself, with --dependency for what it follows"
            yield Problem(field="--rollout-nodes", value=str(self.rollout_nodes), rule=rule, fix=fix)
        if self.parallel is not None and not sweep:
            rule, fix = "has an effect on a sweep alone", "remove it, or give --sweep"
            yield Problem(field="--parallel", value=str(self.parallel), rule=rule, fix=fix)
        if self.rollout_partition is not None and not split:
            rule, fix = "has an effect with --rollout-nodes alone", "remove it, or give --rollout-nodes"
            yield Problem(field="--rollout-partition", value=self.rollout_partition, rule=rule, fix=fix)
        pattern, rule = PARTITIONS
        if self.rollout_partition is not None and re.fullmatch(pattern, self.rollout_partition) is None:
            value = repr(self.rollout_partition)
            yield Problem(field="--rollout-partition", value=value, rule=rule, fix="correct it")
        for name, value in (("--job-name", self.job_name), ("--dependency", self.dependency)):
            if value is not None and (not value.strip() or not value.isprintable()):
                yield Problem(field=name, value=repr(value), rule="a line of text", fix="correct it")


def split_arguments(arguments: Sequence[str]) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Configurations and overrides: what has ``=`` is one of these, unless there is such a file."""
    overrides = tuple(argument for argument in arguments if "=" in argument and not os.path.isfile(argument))
    return tuple(Path(argument) for argument in arguments if argument not in overrides), overrides


def as_given(problem: Problem, settings: Mapping[str, object]) -> Problem:
    """A problem of the profile under the name of the option that gave the value, where one did."""
    top, _, rest = problem.field.partition(".")
    if top not in settings:
        return problem
    option = OPTIONS.get(problem.field, f"--{top.replace('_', '-')}")
    value = rest if problem.value == KEY else problem.value
    return Problem(field=option, value=value, rule=problem.rule, fix=problem.fix)


def submitted_as(config: RunConfig, folder: str) -> Path:
    """The file of the resolved configuration, for the job: named after what it says, as another job needs its own.

    Args:
        config: of the run.
        folder: in its directory.
    """
    digest = hashlib.sha256(as_yaml(config).encode()).hexdigest()
    return Path(config.run.dir, folder, f"config-{digest[:8]}.yaml")
