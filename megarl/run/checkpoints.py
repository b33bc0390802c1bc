"""Checkpoints of runs: staged by every rank, verified by the driver, committed by one rename."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, get_args

from megarl.errors import RunError
from megarl.files import FileRecord, read_json, sync, write_durably

MANIFEST = "manifest.json"
STATE = "state.json"
ROLLOUTS: Final = "rollouts"
"""Directory of the rollouts that wait for the training, if there are any."""
FORMAT = 1
"""Format of the whole checkpoint; other numbers are refused."""
_READERS = 8
_LONGEST_PATH = 1000
_LARGEST_STATE = 1 << 30


class BrokenCheckpointError(RunError):
    """A checkpoint does not match its manifest; the message lists every problem."""

    def __init__(self, directory: Path, problems: Sequence[str]) -> None:
        self.directory = directory
        self.problems = tuple(problems)
        super().__init__("\n  ".join([f"the checkpoint {directory} is broken:", *problems]))


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """The files of a checkpoint, without the manifest itself.

    Args:
        roles: files by role and rank, relative to the role's directory.
        state: file of the driver's state.
        rollouts: files of rollouts that wait for the training.
    """

    step: int
    roles: Mapping[str, Sequence[Sequence[FileRecord]]]
    state: FileRecord
    rollouts: Sequence[FileRecord] = ()

    def files(self) -> Iterator[tuple[str, FileRecord]]:
        """Yields every file, relative to the checkpoint, with its writer."""
        for record in (self.state, *self.rollouts):
            yield "the driver", record
        for role, ranks in self.roles.items():
            for rank, records in enumerate(ranks):
                for record in records:
                    yield f"{role} rank {rank}", dataclasses.replace(record, path=f"{role}/{record.path}")

    def verify(self, directory: Path, *, role: str | None = None) -> None:
        """Reads the files, of one role or of all, and compares them with their records.

        Raises:
            BrokenCheckpointError: a file is missing, differs or is not listed.
        """
        prefix = "" if role is None else f"{role}/"
        expected = [(writer, record) for writer, record in self.files() if record.path.startswith(prefix)]
        with ThreadPoolExecutor(_READERS) as readers:
            compared = readers.map(lambda pair: _problem(directory, *pair), expected)
            problems = [problem for problem in compared if problem is not None]
        listed = {record.path for _, record in expected} | {MANIFEST}
        for path in sorted(directory.rglob("*")):
            name = path.relative_to(directory).as_posix()
            if name.startswith(prefix) and name not in listed and not path.is_dir():
                problems.append(f"{name} is not in the manifest")
        if problems:
            raise BrokenCheckpointError(directory, problems)

    def to_json(self) -> str:
        fields = dataclasses.asdict(self)
        if not self.rollouts:
            del fields["rollouts"]
        return json.dumps({"format": FORMAT, **fields}, indent=1) + "\n"

    @classmethod
    def read(cls, directory: Path) -> CheckpointManifest:
        """Reads the manifest of a checkpoint; raises BrokenCheckpointError if it is missing or cannot be parsed."""
        from megarl.types import RoleName  # megarl status reads no manifest, and has no numpy

        try:
            fields: dict[str, Any] = read_json(directory / MANIFEST)
            if fields["format"] != FORMAT:
                found = _shown(fields["format"])
                raise BrokenCheckpointError(directory, [f"{MANIFEST} has format {found}, not {FORMAT}"])
            roles: dict[str, list[list[FileRecord]]] = {}
            for role, ranks in fields["roles"].items():
                if role not in get_args(RoleName):
                    raise ValueError(f"{_shown(role)} is no role")
                roles[role] = [list(map(_record, records)) for records in ranks]
            step = fields["step"]
            if type(step) is not int or step < 0:
                raise ValueError(f"the step is {_shown(step)}")
            rollouts = [_record(entry) for entry in fields.get("rollouts", ())]
            return cls(step=step, roles=roles, state=_record(fields["state"]), rollouts=rollouts)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BrokenCheckpointError(directory, [f"{MANIFEST} cannot be read: {error}"]) from None


def _shown(value: object) -> str:
    return f"{value!a:.100}"


def _record(fields: Mapping[str, Any]) -> FileRecord:
    """Returns the record of a file in the checkpoint; raises ValueError or TypeError for something else."""
    record = FileRecord(**fields)
    path = PurePosixPath(record.path)
    if path.is_absolute() or ".." in path.parts or not path.name or len(record.path) > _LONGEST_PATH:
        raise ValueError(f"{_shown(record.path)} is no file of the checkpoint")
    if not record.path.isprintable() or type(record.nbytes) is not int or not isinstance(record.sha256, str):
        raise ValueError(f"the record of {_shown(record.path)} has no size or no digest")
    return record


def _problem(directory: Path, writer: str, record: FileRecord) -> str | None:
    """Returns how a file differs from its record; None if it does not."""
    path = directory / record.path
    try:
        nbytes = path.stat().st_size
        if nbytes != record.nbytes:
            return f"{record.path} of {writer} has {nbytes} bytes, not {record.nbytes}"
        if FileRecord.of(path, directory) != record:
            return f"{record.path} of {writer} has other content than was written"
    except OSError as error:
        return f"{record.path} of {writer} cannot be read: {error.strerror}"
    return None


_COMMITTED = re.compile(r"step-(\d+)")
_STAGED = re.compile(r"\.step-(\d+)\.staged")
_UNFINISHED = re.compile(r"\.step-\d+\.(staged|removed)")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint after a step, whose files match its manifest."""

    path: Path
    step: int
    roles: tuple[str, ...]
    state: Mapping[str, Any]


class Checkpoints:
    """The checkpoints of a run, managed by the driver alone.

    `stage` creates a directory that the ranks write into; `commit` verifies and renames it. A
    process that is killed at any moment leaves the earlier checkpoints intact, and at most a
    directory that `clean` removes.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def stage(self, step: int) -> Path:
        """Returns a new empty directory, into which each role writes one; raises RunError if it cannot be made."""
        staged = self._staged(step)
        assert not self.path(step).exists(), f"{self.path(step)} is committed"
        shutil.rmtree(staged, ignore_errors=True)
        with writing(f"checkpoint of step {step}", staged):
            staged.mkdir(parents=True)
            sync(self.directory.parent)
        return staged

    def commit(
        self,
        step: int,
        roles: Mapping[str, Sequence[Sequence[FileRecord]]],
        state: Mapping[str, Any],
        kept: Callable[[Sequence[int]], Container[int]] = lambda steps: steps[-1:],
    ) -> None:
        """Verifies the staged files, makes them the latest checkpoint, and removes others.

        Args:
            roles: files by role and rank.
            state: state of the driver, as JSON.
            kept: function that chooses the steps whose checkpoints stay.

        Raises:
            BrokenCheckpointError: a staged file is missing, differs or is not listed;
                nothing has changed.
            RunError: the directory cannot be written.
        """
        staged = self._staged(step)
        with writing(f"checkpoint of step {step}", staged):
            write_durably(staged / STATE, json.dumps(state, indent=1, allow_nan=False) + "\n")
            rollouts = [FileRecord.of(path, staged) for path in sorted((staged / ROLLOUTS).glob("*"))]
            record = FileRecord.of(staged / STATE, staged)
            manifest = CheckpointManifest(step=step, roles=roles, state=record, rollouts=rollouts)
            manifest.verify(staged)
            write_durably(staged / MANIFEST, manifest.to_json())
            staged.rename(self.path(step))
            sync(self.directory)
        steps = self.steps()
        stay = kept(steps)
        for other in steps:
            if other not in stay:
                self._remove(other)

    def latest(self) -> Checkpoint | None:
        """Verifies and returns the newest checkpoint, if any; raises BrokenCheckpointError if its files changed."""
        steps = self.steps()
        if not steps:
            return None
        path = self.path(steps[-1])
        manifest = CheckpointManifest.read(path)
        if manifest.step != steps[-1] or manifest.state.path != STATE:
            problem = f"{MANIFEST} is that of step {manifest.step}, with the state {manifest.state.path}"
            raise BrokenCheckpointError(path, [problem])
        manifest.verify(path)
        try:
            state = dict(read_json(path / STATE, _LARGEST_STATE))
        except (ValueError, TypeError) as error:
            raise BrokenCheckpointError(path, [f"{STATE} cannot be read: {error}"]) from None
        return Checkpoint(path=path, step=manifest.step, roles=tuple(manifest.roles), state=state)

    def steps(self) -> list[int]:
        """Returns the steps with a committed checkpoint, in order."""
        return sorted(int(match[1]) for match in self._matches(_COMMITTED))

    def staged_step(self) -> int | None:
        """Returns the step of the last unfinished checkpoint, which is being written or whose writer was killed."""
        return max((int(match[1]) for match in self._matches(_STAGED)), default=None)

    def clean(self) -> None:
        """Removes unfinished checkpoints; no other process may write checkpoints of the run."""
        for match in self._matches(_UNFINISHED):
            shutil.rmtree(self.directory / match[0])

    def _matches(self, pattern: re.Pattern[str]) -> list[re.Match[str]]:
        if not self.directory.is_dir():
            return []
        return [match for path in self.directory.iterdir() if (match := pattern.fullmatch(path.name))]

    def _remove(self, step: int) -> None:
        """Renames a checkpoint before its files are deleted: a partial one is never found."""
        removed = self.directory / f".step-{step}.removed"
        self.path(step).rename(removed)
        sync(self.directory)
        shutil.rmtree(removed)

    def path(self, step: int) -> Path:
        """Returns the directory of a committed checkpoint."""
        return self.directory / f"step-{step}"

    def _staged(self, step: int) -> Path:
        return self.directory / f".step-{step}.staged"


@contextmanager
def writing(what: str, directory: Path) -> Iterator[None]:
    """Raises RunError if something, such as `checkpoint of step 3`, cannot be written."""
    try:
        yield
    except OSError as error:
        reason = f"{error.filename or directory}: {error.strerror or error}"
        raise RunError(f"the {what} cannot be written: {reason}") from error
