"""Whether a run that has failed goes on from its last checkpoint, with new processes, in the same command."""

from __future__ import annotations

import os
from typing import Final

from megarl.cluster.calls import WorkerError
from megarl.errors import RunError
from megarl.run.directory import RunDirectory, last_step

IN_JOBS: Final = 3
"""Restarts in a job, where nobody may look."""
_JOB_VARIABLES: Final = ("SLURM_JOB_ID", "RAY_JOB_CONFIG_JSON_ENV_VAR")
"""Environment variables of the jobs of Slurm and Ray."""


class Restarts:
    """Restarts of one command, which end at a limit, and at a second failure without progress.

    Only losses of processes, and what may be the fault of a machine, are followed by a restart (`WorkerError.repeats`).
    Two failures are without progress if both hit the same step, or no step was finished between them.

    Args:
        limit: run.max_restarts.
    """

    def __init__(self, limit: int | None) -> None:
        in_job = any(name in os.environ for name in _JOB_VARIABLES)
        self._limit = (IN_JOBS if in_job else 0) if limit is None else limit
        self._failures: list[tuple[int, str]] = []
        """Of each failure the last finished step, and the cause."""

    def after(self, error: RunError, directory: RunDirectory) -> str:
        """Returns the line that announces the restart after a failure.

        Raises:
            RunError: There is none. It is the error; without progress, it names the earlier failure, too.
        """
        step, cause = last_step(directory, directory.step), str(error).splitlines()[0].removesuffix(".")
        stuck = self._failures and step in (self._failures[-1][0], directory.step)
        if stuck:
            earlier, before = self._failures[-1]
            where = f"after step {earlier}" if earlier else "before the first step was finished"
            raise RunError(f"{error}\n\nThe run was restarted and made no progress. It had failed {where}: {before}.")
        if not isinstance(error, WorkerError) or error.repeats or len(self._failures) == self._limit:
            raise error
        self._failures.append((step, cause))
        steps = directory.checkpoints.steps()
        begin = f"from step {steps[-1]}" if steps else "from the beginning: there is no checkpoint yet"
        return f"{cause}; restart {len(self._failures)} of {self._limit} {begin}"
