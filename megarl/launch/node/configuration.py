"""The configuration of a job's run: of as many nodes as the job has, on the Ray that the job starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from megarl.config import ConfigError, Problem, RunConfig, load
from megarl.config.files import merged

_AUTO: Final = "auto"
JOINED: Final = f"cluster.address={_AUTO}"
"""Which Ray takes from the driver's environment: a run that goes on in another job has the same configuration."""


def job_configuration(path: str, overrides: Sequence[str], nodes: int) -> RunConfig:
    """Reads the configuration.

    Args:
        path: of the file.
        overrides: of its settings.
        nodes: of the job.

    Raises:
        ConfigError: it is wrong, or contradicts the job; every problem is listed.
    """
    config = load(path, [*overrides, JOINED])
    problems = [*_other_size(config, nodes), *other_ray(Path(path), overrides)]
    if problems:
        raise ConfigError(problems, path)
    return config


def _other_size(config: RunConfig, nodes: int) -> Iterator[Problem]:
    if config.cluster.nodes != nodes:
        rule, fix = f"the job's nodes, {nodes}", f"set cluster.nodes={nodes}, or start the job on others"
        yield Problem(field="cluster.nodes", value=str(config.cluster.nodes), rule=rule, fix=fix)


def other_ray(path: Path, overrides: Sequence[str]) -> Iterator[Problem]:
    """The problem of a configuration that names a Ray to join.

    Raises:
        ConfigError: the file cannot be read.
    """
    cluster = merged(path, overrides)[0].get("cluster")
    address = cluster.get("address") if isinstance(cluster, Mapping) else None
    if address not in (None, _AUTO):
        rule, fix = "null: the job starts a Ray of its own", "remove it, or use megarl launch ray"
        yield Problem(field="cluster.address", value=str(address), rule=rule, fix=fix)
