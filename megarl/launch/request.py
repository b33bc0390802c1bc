"""A launch as the command line requests it, and checks of its options against each other."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from megarl.config import RunConfig, as_yaml
from megarl.config.inheritance import merged
from megarl.config.problems import KEY, Problem, shown

_RUNTIME_OPTIONS = {"name": "--runtime", "image": "--container", "mounts": "--mounts", "python": "--python"}
OPTIONS: Mapping[str, str] = {f"runtime.{name}": option for name, option in _RUNTIME_OPTIONS.items()}
"""Command-line options of the profile's fields whose names differ, by field."""
_AUTO = "auto"
JOB_RAY = f"cluster.address={_AUTO}"
"""The driver reads Ray's address from the environment, so a run that resumes in another job has the same config."""


class LaunchMode(Enum):
    """How runs are started."""

    SBATCH = auto()  # by sbatch on this machine
    TUNNEL = auto()  # by the profile's tunnel for NeMo-Run
    LOCAL = auto()  # on this machine, without Slurm


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """A requested launch; None leaves a value to the configuration, the profile or the cluster.

    Args:
        configs: one, or the runs of a chain in their order.
        settings: fields of the profile that the command line sets.
        dependency: of the first job, as sbatch takes it.
        sweeps: ``key.path=value,value``; every combination is a run.
        parallel: runs of a sweep at the same time.
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
    dry_run: bool = False
    mode: LaunchMode = LaunchMode.SBATCH

    def contradictions(self) -> Iterator[Problem]:
        """Finds options that exclude each other, are without effect or malformed."""
        chain = len(self.configs) > 1
        sweep = bool(self.sweeps)
        alone = "submit it by itself, with --dependency for what it follows"
        unswept = self.parallel is not None and not sweep
        no_sweep = "has an effect on a sweep alone"
        rules = [
            (not self.configs, "CONFIG", "(missing)", "at least one configuration", "name the YAML file of the run"),
            (chain and sweep, "--sweep", shown(" ".join(self.sweeps)), "not of several configurations", alone),
            (unswept, "--parallel", self.parallel, no_sweep, "remove it, or give --sweep"),
        ]
        for name, text in (("--job-name", self.job_name), ("--dependency", self.dependency)):
            wrong = text is not None and (not text.strip() or not text.isprintable())
            rules.append((wrong, name, repr(text), "a line of text", "correct it"))
        for wrong, field, given, rule, fix in rules:
            if wrong:
                yield Problem(field=field, value=str(given), rule=rule, fix=fix)


def split_arguments(arguments: Sequence[str]) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Splits arguments into configurations and overrides; those contain ``=`` and are not files."""
    overrides = tuple(argument for argument in arguments if "=" in argument and not os.path.isfile(argument))
    return tuple(Path(argument) for argument in arguments if argument not in overrides), overrides


def as_option(problem: Problem, settings: Mapping[str, object]) -> Problem:
    """Names the command-line option, not the profile's field, where the option set the value."""
    top, _, rest = problem.field.partition(".")
    if top not in settings:
        return problem
    option = OPTIONS.get(problem.field, f"--{top.replace('_', '-')}")
    value = rest if problem.value == KEY else problem.value
    return Problem(field=option, value=value, rule=problem.rule, fix=problem.fix)


def submitted_as(config: RunConfig) -> Path:
    """Returns the path of the resolved configuration in run.dir; its name has the content's hash."""
    digest = hashlib.sha256(as_yaml(config).encode()).hexdigest()
    return Path(config.run.dir, "slurm", f"config-{digest[:8]}.yaml")


def unwritable(run_dir: object, error: OSError, what: str = "") -> Problem:
    rule = f"can be written ({what}{error.strerror})"
    return Problem(field="run.dir", value=str(run_dir), rule=rule, fix="choose another run.dir")


def names_other_ray(path: Path, overrides: Sequence[str]) -> Iterator[Problem]:
    """Reports a configuration that names a Ray cluster to join. Raises ConfigError if the file cannot be read."""
    cluster = merged(path, overrides)[0].get("cluster")
    address = cluster.get("address") if isinstance(cluster, Mapping) else None
    if address not in (None, _AUTO):
        rule = "null: the job starts a Ray of its own"
        fix = "remove it, or submit the run to that cluster (docs/ray.md)"
        yield Problem(field="cluster.address", value=str(address), rule=rule, fix=fix)
