"""A launch as the command line requests it, and checks of its options against each other."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megarl.config.problems import Problem

_AUTO = "auto"
JOB_RAY = f"cluster.address={_AUTO}"
"""The driver reads Ray's address from the environment, so a run that resumes in another job has the same config."""


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """A requested launch; None leaves a value to the configuration, the profile or the cluster.

    Args:
        configs: files of one run, or of a chain's runs in their order.
        settings: fields of the profile that the command line sets.
        dependency: dependency of the first job, as sbatch takes it.
        mode: sbatch on this machine, the profile's tunnel for NeMo-Run, or no Slurm.
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
    mode: Literal["sbatch", "tunnel", "local"] = "sbatch"

    def malformed(self) -> Iterator[Problem]:
        """Finds missing configurations and options that are no line of text."""
        if not self.configs:
            fix = "name the YAML file of the run"
            yield Problem("CONFIG", "(missing)", "at least one configuration", fix)
        for name, text in (("--job-name", self.job_name), ("--dependency", self.dependency)):
            if text is not None and (not text.strip() or not text.isprintable()):
                yield Problem(name, repr(text), "a line of text", "correct it")


def split_arguments(arguments: Sequence[str]) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Splits arguments into configurations and overrides; those contain ``=`` and are not files."""
    configs: list[Path] = []
    overrides: list[str] = []
    for argument in arguments:
        if "=" in argument and not os.path.isfile(argument):
            overrides.append(argument)
        else:
            configs.append(Path(argument))
    return tuple(configs), tuple(overrides)


def unwritable(run_dir: object, error: OSError, what: str = "") -> Problem:
    rule = f"can be written ({what}{error.strerror})"
    return Problem("run.dir", str(run_dir), rule, "choose another run.dir")


def other_ray(raw: Mapping[str, Any]) -> list[Problem]:
    """Reports a configuration, which may be invalid, that names a Ray cluster to join."""
    cluster = raw.get("cluster")
    address = cluster.get("address") if isinstance(cluster, Mapping) else None
    if address in (None, _AUTO):
        return []
    rule = "null: the job starts a Ray of its own"
    fix = "remove it, or submit the run to that cluster (docs/ray.md)"
    return [Problem("cluster.address", str(address), rule, fix)]
