"""The manifest of a checkpoint: which rank wrote which file of which role, of what size and content."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.errors import RunError
from megarl.files import FileRecord

NAME = "manifest.json"
STATE = "state.json"
FORMAT = 1
"""Of the manifest and of the files beside it; other numbers are refused."""

_READERS = 8
"""Files that are read at once."""


class BrokenCheckpointError(RunError):
    """A checkpoint is not what its manifest says; the message lists every problem."""

    def __init__(self, directory: Path, problems: Sequence[str]) -> None:
        self.directory, self.problems = directory, tuple(problems)
        super().__init__("\n  ".join([f"the checkpoint {directory} is broken:", *problems]))


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """Every file of a checkpoint but the manifest itself.

    Args:
        step: after which it was made.
        roles: for each role and rank, the files that the rank wrote, relative to the role's directory.
        state: file of the driver's state.
    """

    step: int
    roles: Mapping[str, Sequence[Sequence[FileRecord]]]
    state: FileRecord

    def files(self) -> Iterator[tuple[str, FileRecord]]:
        """Yields every file, relative to the checkpoint, with its writer."""
        yield "the driver", self.state
        for role, ranks in self.roles.items():
            for rank, records in enumerate(ranks):
                for record in records:
                    yield f"{role} rank {rank}", dataclasses.replace(record, path=f"{role}/{record.path}")

    def verify(self, directory: Path, *, role: str | None = None) -> None:
        """Reads every file and compares it with its record.

        Args:
            role: verify its files only; None verifies all.

        Raises:
            BrokenCheckpointError: a file is missing, differs or is not listed.
        """
        prefix = "" if role is None else f"{role}/"
        expected = [(writer, record) for writer, record in self.files() if record.path.startswith(prefix)]
        with ThreadPoolExecutor(_READERS) as readers:
            problems = [found for found in readers.map(lambda pair: _problem(directory, *pair), expected) if found]
        listed = {record.path for _, record in expected} | {NAME}
        present = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir()}
        unlisted = sorted(path for path in present - listed if path.startswith(prefix))
        problems += [f"{path} is not in the manifest" for path in unlisted]
        if problems:
            raise BrokenCheckpointError(directory, problems)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n"

    @classmethod
    def read(cls, directory: Path) -> CheckpointManifest:
        """Reads the manifest of a checkpoint.

        Raises:
            BrokenCheckpointError: it is missing or cannot be parsed.
        """
        try:
            fields: dict[str, Any] = json.loads((directory / NAME).read_text(encoding="utf-8"))
            if fields["format"] != FORMAT:
                raise BrokenCheckpointError(directory, [f"{NAME} has format {fields['format']}, not {FORMAT}"])
            roles = {
                role: [[FileRecord(**record) for record in records] for records in ranks]
                for role, ranks in fields["roles"].items()
            }
            return cls(step=fields["step"], roles=roles, state=FileRecord(**fields["state"]))
        except (OSError, json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise BrokenCheckpointError(directory, [f"{NAME} cannot be read: {error}"]) from None


def _problem(directory: Path, writer: str, record: FileRecord) -> str | None:
    """What is wrong with a file; None if nothing is."""
    path = directory / record.path
    try:
        nbytes = path.stat().st_size
        if nbytes != record.nbytes:
            return f"{record.path} of {writer} has {nbytes} bytes, not {record.nbytes}"
        found = FileRecord.of(path, directory)
    except OSError as error:
        return f"{record.path} of {writer} cannot be read: {error.strerror}"
    return None if found == record else f"{record.path} of {writer} has other content than was written"
