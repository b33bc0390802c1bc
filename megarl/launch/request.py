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
from megarl.config.problems import KEY, Problem

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
    """

    configs: tuple[Path, ...]
    overrides: tuple[str, ...] = ()
    profile: Path | None = None
    settings: Mapping[str, object]
    nodes: int | None = None
    gpus_per_node: int | None = None
    job_name: str | None = None
    dependency: str | None = None
    dry_run: bool = False
    mode: LaunchMode = LaunchMode.SBATCH

    def malformed(self) -> Iterator[Problem]:
        """Finds missing configurations and options that are no line of text."""
        if not self.configs:
            rule = "at least one configuration"
            yield Problem(field="CONFIG", value="(missing)", rule=rule, fix="name the YAML file of the run")
        for name, text in (("--job-name", self.job_name), ("--dependency", self.dependency)):
            if text is not None and (not text.strip() or not text.isprintable()):
                yield Problem(field=name, value=repr(text), rule="a line of text", fix="correct it")


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


def run_directory(path: Path, overrides: Sequence[str]) -> str | None:
    """Returns run.dir of a configuration that may be invalid. Raises ConfigError if the file cannot be read."""
    run = merged(path, overrides)[0].get("run")
    named = run.get("dir") if isinstance(run, Mapping) else None
    return named if isinstance(named, str) else None


def names_other_ray(path: Path, overrides: Sequence[str]) -> Iterator[Problem]:
    """Reports a configuration that names a Ray cluster to join. Raises ConfigError if the file cannot be read."""
    cluster = merged(path, overrides)[0].get("cluster")
    address = cluster.get("address") if isinstance(cluster, Mapping) else None
    if address not in (None, _AUTO):
        rule = "null: the job starts a Ray of its own"
        fix = "remove it, or submit the run to that cluster (docs/ray.md)"
        yield Problem(field="cluster.address", value=str(address), rule=rule, fix=fix)
