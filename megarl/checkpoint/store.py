"""The checkpoints of a run: a directory each, which gets its name when everything in it is verified and durable."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.checkpoint.manifest import NAME, STATE, Manifest
from megarl.files import FileRecord, sync, write_durably

_COMMITTED = re.compile(r"step-(\d+)")
_UNFINISHED = re.compile(r"\.step-\d+\.(staged|removed)")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint whose files are what its manifest says.

    Args:
        path: its directory; each role has a directory of its name in it.
        step: after which it was made.
        roles: that it holds.
        state: the driver's, as it was given to ``commit``.
    """

    path: Path
    step: int
    roles: tuple[str, ...]
    state: Mapping[str, Any]


class Checkpoints:
    """Makes, finds and forgets the checkpoints of a run; used by the driver alone.

    ``stage`` makes a directory that the ranks write into; ``commit`` verifies and renames it. A process that is killed
    at any moment leaves the earlier checkpoints as they were, and maybe a directory that ``clean`` removes.

    Args:
        directory: of all checkpoints of the run; made with the first.
        keep: newest checkpoints to keep, at least 1.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        assert keep >= 1
        self.directory, self._keep = directory, keep

    def stage(self, step: int) -> Path:
        """An empty directory for the checkpoint after a step; each role writes a directory of its name into it."""
        staged = self._staged(step)
        assert not self._path(step).exists(), f"{self._path(step)} is committed"
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        sync(self.directory.parent)
        return staged

    def commit(
        self, step: int, roles: Mapping[str, Sequence[Sequence[FileRecord]]], state: Mapping[str, Any]
    ) -> Checkpoint:
        """Verifies what is staged, makes it the latest checkpoint, and removes those that are too many.

        Args:
            step: that was staged.
            roles: for each role, what its ranks say that they wrote, in the order of the ranks.
            state: the driver's; whatever JSON can hold exactly.

        Raises:
            BrokenCheckpointError: a staged file is missing, differs or is not listed; nothing has changed.
        """
        staged = self._staged(step)
        write_durably(staged / STATE, json.dumps(state, indent=1, allow_nan=False) + "\n")
        manifest = Manifest(step=step, roles=roles, state=FileRecord.of(staged / STATE, staged))
        manifest.verify(staged)
        write_durably(staged / NAME, manifest.to_json())
        staged.rename(self._path(step))
        sync(self.directory)
        for old in self.steps()[: -self._keep]:
            self._remove(old)
        return Checkpoint(path=self._path(step), step=step, roles=tuple(roles), state=state)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint, verified; None where there is none.

        Raises:
            BrokenCheckpointError: it is not what it was when it was committed.
        """
        steps = self.steps()
        if not steps:
            return None
        path = self._path(steps[-1])
        manifest = Manifest.read(path)
        manifest.verify(path)
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        return Checkpoint(path=path, step=manifest.step, roles=tuple(manifest.roles), state=state)

    def steps(self) -> list[int]:
        """The steps that have a committed checkpoint, in order."""
        matches = (_COMMITTED.fullmatch(name) for name in self._names())
        return sorted(int(match[1]) for match in matches if match)

    def clean(self) -> None:
        """Removes what a killed process left unfinished; no other process may be writing checkpoints of the run."""
        for name in self._names():
            if _UNFINISHED.fullmatch(name):
                shutil.rmtree(self.directory / name)

    def _names(self) -> list[str]:
        return [path.name for path in self.directory.iterdir()] if self.directory.is_dir() else []

    def _remove(self, step: int) -> None:
        """Takes a checkpoint its name first, so that no half of one is ever found."""
        removed = self.directory / f".step-{step}.removed"
        self._path(step).rename(removed)
        sync(self.directory)
        shutil.rmtree(removed)

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step}"

    def _staged(self, step: int) -> Path:
        return self.directory / f".step-{step}.staged"
