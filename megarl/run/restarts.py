"""Whether a failed run continues from its last checkpoint, with new processes, in the same command."""

from __future__ import annotations

import os
from typing import Final

from megarl.cluster.calls import WorkerError
from megarl.cluster.placement import MissingNodesError
from megarl.config import ConfigError, TrainingConfig, on_first_nodes
from megarl.errors import RunError
from megarl.run.directory import RunDirectory, last_step
from megarl.texts import counted

IN_JOBS: Final = 3
"""Restarts in a job, which nobody may watch."""
_JOB_VARIABLES = ("SLURM_JOB_ID", "RAY_JOB_CONFIG_JSON_ENV_VAR")
"""Environment variables of the jobs of Slurm and Ray."""


class Restarts:
    """Restarts of one command, which end at run.max_restarts, and at a second failure without progress.

    Only losses of processes, and what may be the fault of a machine, are followed by a restart
    (`WorkerError.repeats`). Two failures are without progress if both hit the same step, or no step
    was finished between them.
    """

    def __init__(self, config: TrainingConfig) -> None:
        limit = config.run.max_restarts
        if limit is None:
            in_job = any(name in os.environ for name in _JOB_VARIABLES)
            limit = IN_JOBS if in_job else 0
        self._limit = limit
        self._failures: list[tuple[int, str]] = []  # last finished step and cause of each
        self._full_config = config
        self.config = config
        """The configuration of the next attempt, which may have fewer nodes."""

    def after(self, error: RunError, directory: RunDirectory) -> str:
        """Returns the line that announces the restart after a failure.

        Raises:
            RunError: no restart follows. It is the error; without progress, it names
                the earlier failure, too.
        """
        steps = directory.checkpoints.steps()
        begin = f"from step {steps[-1]}" if steps else "from the beginning: there is no checkpoint yet"
        if self._failures and isinstance(error, MissingNodesError) and self._shrink(error.nodes):
            all_nodes = self._full_config.cluster.nodes
            nodes = counted(self.config.cluster.nodes, "node")
            return f"{error.nodes} of {all_nodes} nodes are left; it restarts on {nodes}, {begin}"
        step = last_step(directory, directory.step)
        cause = str(error).splitlines()[0].removesuffix(".")
        if self._failures and step in (self._failures[-1][0], directory.step):
            earlier, before = self._failures[-1]
            where = f"after step {earlier}" if earlier else "before the first step was finished"
            raise RunError(f"{error}\n\nThe run was restarted and made no progress. It had failed {where}: {before}.")
        if not isinstance(error, WorkerError) or error.repeats or len(self._failures) == self._limit:
            raise error
        self._failures.append((step, cause))
        self.config = self._full_config
        return f"{cause}; restart {len(self._failures)} of {self._limit} {begin}"

    def _shrink(self, found: int) -> bool:
        """Takes as many nodes for the next attempt as are left and can be used; returns whether these are enough."""
        min_nodes = self._full_config.cluster.min_nodes
        if min_nodes is None or found >= self.config.cluster.nodes:  # all nodes live: others use their devices
            return False
        for nodes in range(found, min_nodes - 1, -1):
            try:
                self.config = on_first_nodes(self._full_config, nodes)
            except ConfigError:
                continue
            return True
        return False
