"""What the last Slurm job of a run has left in its directory: how far it came, where its logs are, how it ended."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.obs.attempts import Attempt
from megarl.obs.lines import read_lines

_NAME = re.compile(r"(\d+)-(\d+)")
_CELL = re.compile(r"cell-(\d+)")
_NODE_FAILURE = re.compile(r"^srun: error: Node failure on (\S+)$", re.MULTILINE)
_TAIL_BYTES = 1 << 16
_TERMINATED = 143
_END = "end.json"
_ATTACH = "attach"


@dataclass(frozen=True, kw_only=True)
class JobStage:
    """Something that the job has come to.

    Args:
        stage: what it is.
        time: seconds since 1970.
    """

    stage: str
    time: float


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """How the job ended, as its head tells it.

    Args:
        time: seconds since 1970.
        exit_code: of the job; 128 and the number of the signal that ended it.
        reason: in words.
        node: at fault, if one is.
    """

    time: float
    exit_code: int
    reason: str
    node: str | None


@dataclass(frozen=True, kw_only=True)
class Job:
    """A start of a job.

    Args:
        id: Slurm's number.
        restart: how often Slurm had started it before.
        directory: of its logs.
        logs: names of the files in it.
        attach: command that opens a shell in the job; None where there is none.
        began: seconds since 1970.
        stages: that it has come to.
        end: None while it lasts, and where its head was killed.
    """

    id: str
    restart: int
    directory: str
    logs: tuple[str, ...]
    attach: str | None
    began: float
    stages: tuple[JobStage, ...]
    end: JobEnd | None

    def has(self, attempt: Attempt) -> bool:
        """Whether it is the job of an attempt."""
        return (attempt.job, attempt.restart) == (self.id, self.restart)

    def follows(self, attempt: Attempt) -> bool:
        """Whether it was started after an attempt of another one."""
        return self.began > attempt.time and not self.has(attempt)


def last_job(run_dir: Path, output: str | None) -> Job | None:
    """The job that was started last; None without one.

    Args:
        run_dir: of the run.
        output: file with what the last job printed.
    """
    found = [path for path in (run_dir / "slurm").glob("*-*") if _NAME.fullmatch(path.name)]
    if not found:
        return None
    directory = max(found, key=_number)
    number, restart = _number(directory)
    attach = directory / _ATTACH
    stages = tuple(
        JobStage(stage=str(line["stage"]), time=float(line["time"]))
        for line in read_lines(directory / "times.jsonl")
        if {"stage", "time"} <= line.keys()
    )
    return Job(
        id=str(number),
        restart=restart,
        directory=str(directory),
        logs=tuple(sorted((path.name for path in directory.glob("*.log")), key=lambda name: (len(name), name))),
        attach=str(attach) if attach.exists() else None,
        began=stages[0].time if stages else directory.stat().st_mtime,
        stages=stages,
        end=_explained(_end(directory / _END), _printed(number, output)),
    )


def last_output(run_dir: Path) -> str | None:
    """What the last job printed, before it came to anything as well; None without one.

    Args:
        run_dir: of the run; that of a sweep's has its job's output beside it, by its index.
    """
    files = [*(run_dir / "slurm").glob("*.out")]
    if cell := _CELL.match(run_dir.name):
        files += (run_dir.parent / "slurm").glob(f"*_{cell[1]}.out")
    return str(max(files, key=lambda path: path.stat().st_mtime)) if files else None


def _number(directory: Path) -> tuple[int, int]:
    number, _, restart = directory.name.partition("-")
    return int(number), int(restart)


def _end(path: Path) -> JobEnd | None:
    try:
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return JobEnd(
            time=path.stat().st_mtime,
            exit_code=int(told["exit_code"]),
            reason=str(told["reason"]),
            node=told.get("node"),
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):  # missing, or half of it
        return None


def _printed(job: int, output: str | None) -> str:
    """What the job printed at last; nothing where the file is another job's or cannot be read."""
    path = Path(output or "")
    if path.stem != str(job) and "_" not in path.stem:  # an array's job has its own number and another in the name
        return ""
    try:
        return _tail(path)
    except OSError:
        return ""


def _explained(end: JobEnd | None, printed: str) -> JobEnd | None:
    """The end, with the node for whose failure Slurm has ended the job: its head just gets SIGTERM.

    Args:
        printed: by the job, with srun's messages.
    """
    if end is None or end.exit_code != _TERMINATED:
        return end
    failed = _NODE_FAILURE.findall(printed)
    return replace(end, node=failed[0], reason=f"{end.reason}, as node {failed[0]} has failed") if failed else end


def _tail(path: Path) -> str:
    """What a file ends with."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
        return file.read().decode(errors="replace")
