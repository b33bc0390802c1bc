"""Finds the checkpoint of a path: in Megatron-LM's directories, and in the runs of MegaRL."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from megarl.convert.dcp import METADATA
from megarl.errors import UsageError
from megarl.run.checkpoints import MANIFEST, CheckpointManifest, Checkpoints
from megarl.types import HEADS, HeadName, RoleName

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""Megatron-LM's name for weights without training state: it loads them without optimizer state."""
HF_FILES = "hf"
"""Directory of an imported checkpoint with the model's configuration and tokenizer."""
CHECKPOINTS = "checkpoints"

_ITERATION = re.compile(r"iter_(\d{7,})")


@dataclass(frozen=True, kw_only=True)
class FoundCheckpoint:
    """A directory of sharded tensors, with ``.metadata``.

    Args:
        root: Megatron-LM's save directory, or a run.
        role: role of a run; None in Megatron-LM's.
    """

    directory: Path
    root: Path
    role: RoleName | None = None

    def head(self, configured: HeadName) -> HeadName:
        """Returns the head of the role, or, for Megatron's, that of its configuration."""
        return configured if self.role is None else HEADS[self.role]

    def verify(self) -> None:
        """Compares the files of a role with its checkpoint's manifest; Megatron's have none."""
        if self.role is not None:
            CheckpointManifest.read(self.directory.parent).verify(self.directory.parent, role=self.role)


def find_checkpoint(path: Path, *, role: RoleName | None = None, step: int | None = None) -> FoundCheckpoint:
    """Finds the checkpoint of a path; raises UsageError where there is none, or role or step have no meaning.

    Args:
        path: Megatron-LM's save directory or one iteration in it; or a run of MegaRL, one
            checkpoint of it, or a role's directory in that.
        role: role of a run's checkpoint; the actor, or the only one, by default.
        step: step of the checkpoint; the latest by default.
    """
    # Its name and parent say what it is; links stay where they are.
    path = Path(os.path.abspath(path))
    if (path / CHECKPOINTS).is_dir():
        return _in_run(_step_directory(path, step), role)
    if (path / TRACKER).is_file() or _iterations(path):
        _refuse(path, role=role)
        return _in_megatron(path, step)
    _refuse(path, step=step)
    if (path / MANIFEST).is_file():
        return _in_run(path, role)
    _refuse(path, role=role)
    if not (path / METADATA).is_file():
        kinds = f"neither Megatron-LM's ({TRACKER} or {METADATA}) nor a run's ({CHECKPOINTS})"
        raise UsageError(f"{path} has no checkpoint: {kinds}; choose another one")
    if (path.parent / MANIFEST).is_file():
        return _in_run(path.parent, path.name)
    return FoundCheckpoint(directory=path, root=path.parent)


def _step_directory(run: Path, step: int | None) -> Path:
    steps = Checkpoints(run / CHECKPOINTS, keep=1).steps()
    if not steps:
        raise UsageError(f"{run} has no checkpoint yet; choose another one")
    if step is None:
        step = steps[-1]
    if step not in steps:
        raise UsageError(f"{run} has no checkpoint of step {step}; there are {', '.join(map(str, steps))}")
    return run / CHECKPOINTS / f"step-{step}"


def _in_run(directory: Path, role: str | None) -> FoundCheckpoint:
    manifest = CheckpointManifest.read(directory)
    roles: list[RoleName] = [name for name in get_args(RoleName) if name in manifest.roles]
    if role is None:
        role = roles[0] if len(roles) == 1 else "actor"
    for name in roles:
        if name == role:
            return FoundCheckpoint(directory=directory / name, root=directory.parent.parent, role=name)
    raise UsageError(f"{directory} has no {role}; choose --role {' or '.join(roles)}")


def _in_megatron(root: Path, step: int | None) -> FoundCheckpoint:
    choice = f"choose one with --step: {', '.join(map(str, _iterations(root)))}"
    if step is None:
        if not (root / TRACKER).is_file():
            raise UsageError(f"{root} has no {TRACKER}; {choice}")
        latest = (root / TRACKER).read_text().strip()
        if latest != RELEASE and not latest.isdecimal():
            raise UsageError(f"{root / TRACKER} says {latest!r}, which is no iteration; {choice}")
        step = None if latest == RELEASE else int(latest)
    directory = root / (RELEASE if step is None else f"iter_{step:07d}")
    if not (directory / METADATA).is_file():
        raise UsageError(f"{directory} is not a checkpoint of Megatron's torch_dist format; {choice}")
    return FoundCheckpoint(directory=directory, root=root)


def _iterations(root: Path) -> list[int]:
    matches = [_ITERATION.fullmatch(path.name) for path in root.glob("iter_*")]
    return sorted(int(match[1]) for match in matches if match)


def _refuse(path: Path, *, role: str | None = None, step: int | None = None) -> None:
    """Raises UsageError for options that would have no effect."""
    if role is not None:
        raise UsageError(f"--role {role} has no meaning for {path}: roles are of a run of MegaRL; leave it out")
    if step is not None:
        raise UsageError(f"--step {step} has no meaning for {path}, which is one checkpoint; leave it out")
