"""Saves the checkpoints of a run: all but the last one are written while the training goes on."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, Final, Protocol

from megarl.cluster.calls import Call
from megarl.cluster.driver_environment import ignore_interrupts
from megarl.cluster.session import Session
from megarl.config import TrainingConfig
from megarl.errors import RunError
from megarl.files import FileRecord
from megarl.groups.trainers import RemoteRole
from megarl.megatron.worker import MegatronWorker
from megarl.run.checkpoints import ROLLOUTS, writing
from megarl.run.directory import RunDirectory
from megarl.types import RoleName

_INTERVAL_S: Final = 1.0
"""Time between two questions to the ranks whether they have written."""


class Checkpointable(Protocol):
    """What is saved; see `loop.train.Trainer`."""

    @property
    def roles(self) -> Mapping[RoleName, RemoteRole]: ...

    async def to_training(self) -> None: ...

    def state(self, directory: Path) -> dict[str, Any]: ...


@dataclass(eq=False, kw_only=True)
class _Writing:
    """A checkpoint that is being written.

    Args:
        state: state of the driver.
        began: monotonic seconds.
        commit: the commit in progress, since all ranks have written.
    """

    step: int
    state: Mapping[str, Any]
    began: float
    commit: Future[None] | None = None


class Saver:
    """Saves checkpoints; at most one is being written while the training goes on.

    The ranks copy their parts to host memory and write the copies in a thread. A task of the driver
    asks them from time to time whether they have written; when all have, a thread of the driver
    verifies and commits.
    """

    def __init__(
        self, config: TrainingConfig, directory: RunDirectory, trainer: Checkpointable, session: Session
    ) -> None:
        self._config = config
        self._directory = directory
        self._trainer = trainer
        self._roles = [trainer.roles[name] for name in config.saved]
        self._writing: _Writing | None = None
        self._longest_s = 0.0
        self._session = session

    async def save(self, step: int) -> None:
        """Saves the state after a step; returns when the training may continue. Waits for earlier saves.

        Raises:
            RunError: it cannot be written, or that before it could not be.
        """
        await self.wait()
        began = time.monotonic()
        await self._trainer.to_training()
        staged = self._directory.checkpoints.stage(step)
        background = self._config.checkpoint.async_save and step < self._config.steps
        calls: dict[str, Call[list[FileRecord] | None]] = {}
        for role in self._roles:
            path = str(staged / role.name)
            calls[role.name] = role.call(MegatronWorker.save, path, in_background=background)
        with writing(f"checkpoint of step {step}", staged):
            state = copy.deepcopy(self._trainer.state(staged / ROLLOUTS))
        files = {name: await call for name, call in calls.items()}
        saved = _Writing(step=step, state=state, began=began)
        if background:
            self._writing = saved
            self._session.spawn(self._watch(saved))
        else:
            self._finish(saved, files)

    async def check(self) -> None:
        """Raises the error of a checkpoint whose commit has failed."""
        if self._writing is not None and self._writing.commit is not None and self._writing.commit.done():
            await self.wait()

    async def wait(self) -> None:
        """Waits until the last checkpoint is committed.

        Raises:
            RunError: it could not be written.
        """
        saved = self._writing
        if saved is None:
            return
        if saved.commit is None:
            await self._commit_written(saved, wait=True)
        assert saved.commit is not None
        limit = self._config.cluster.time_limits.checkpoint
        commit = asyncio.wrap_future(saved.commit)
        await asyncio.wait([commit], timeout=limit)
        self._writing = None  # not before: after an interrupt, `close` lets the commit finish
        if not commit.done():
            late = f"is written, but has not been verified and renamed in {limit:g} s"
            fix = f"see whether {self._directory.checkpoint_dir} answers, or raise cluster.time_limits.checkpoint"
            raise RunError(f"The checkpoint of step {saved.step} {late}: {fix}.")
        commit.result()

    @property
    def expected_s(self) -> float:
        """Returns the seconds of the longest save so far; twice that while one is being written."""
        return self._longest_s if self._writing is None else 2 * self._longest_s

    def close(self) -> None:
        """Lets a commit finish, uninterrupted, within the time limit of a checkpoint."""
        ignore_interrupts()
        if self._writing is not None and self._writing.commit is not None:
            wait([self._writing.commit], self._config.cluster.time_limits.checkpoint)

    async def _watch(self, saved: _Writing) -> None:
        """Polls the ranks until all have written and the commit has begun."""
        await self._commit_written(saved, wait=False)
        while saved.commit is None:
            await asyncio.sleep(_INTERVAL_S)
            await self._commit_written(saved, wait=False)

    async def _commit_written(self, saved: _Writing, *, wait: bool) -> None:
        """Begins to commit a checkpoint, if all ranks have written, and it has not begun."""
        calls = [role.call(MegatronWorker.saved, wait=wait) for role in self._roles]
        files: dict[str, list[list[FileRecord] | None]] = {}
        for role, call in zip(self._roles, calls, strict=True):
            files[role.name] = await call
        if saved.commit is not None or any(None in ranks for ranks in files.values()):
            return
        saved.commit = commit = Future[None]()

        def run() -> None:
            try:
                commit.set_result(self._finish(saved, files))
            except BaseException as error:
                commit.set_exception(error)

        # The end of the program does not wait for it: a file system may never answer.
        Thread(target=run, name="checkpoint", daemon=True).start()

    def _finish(self, saved: _Writing, files: Mapping[str, Sequence[list[FileRecord] | None]]) -> None:
        complete: dict[str, list[list[FileRecord]]] = {}
        for role, ranks in files.items():
            complete[role] = [records for records in ranks if records is not None]
        self._directory.commit(saved.step, complete, saved.state)
        self._longest_s = max(self._longest_s, time.monotonic() - saved.began)
