"""The Slurm jobs of a run: submissions, how far each job came, where its logs are, how it ended."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.files import read_lines, write_durably
from megarl.run.attempts import Attempt
from megarl.run.status.format import ago

_FOLDERS = ("slurm", "ray")
_SUBMITTED = "submitted.json"


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What was prepared for a cluster.

    Args:
        job: its number or name; None where the configuration was written, and no job is known of.
        time: seconds since 1970.
    """

    job: str | None
    time: float


def note(folder: Path, job: str) -> None:
    """Notes the job of a run that was just submitted. Where that cannot be written, the job waits all the same.

    Args:
        folder: of the run's configuration, as RUN_DIR/slurm.
        job: its number or name.
    """
    try:
        write_durably(folder / _SUBMITTED, json.dumps({"job": job}) + "\n")
    except OSError as error:
        print(f"{folder / _SUBMITTED}: {error.strerror}; megarl status will not know of job {job}", file=sys.stderr)


def noted(run_dir: Path) -> Submission | None:
    """The last job that was noted; the file's own time is that of the submission."""
    found: list[Submission] = []
    for file in (run_dir / folder / _SUBMITTED for folder in _FOLDERS):
        try:
            found.append(Submission(job=json.loads(file.read_text())["job"], time=file.stat().st_mtime))
        except (OSError, ValueError, KeyError, TypeError):  # missing, or not to be read
            continue
    return max(found, key=lambda submission: submission.time, default=None)


def prepared(run_dir: Path) -> list[Path]:
    """The configurations that were written for a cluster, the last one first; a run has them before it begins."""
    found = (file for folder in _FOLDERS for file in (run_dir / folder).glob("config-*.yaml"))
    return sorted(found, key=lambda file: file.stat().st_mtime, reverse=True)


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
        output: file with what it printed, if it is there.
        printed: the last lines of it, while no agent has begun.
        directory: of its logs; None while no agent has begun.
        logs: names of the files in it.
        attach: command that opens a shell in the job; None where there is none.
        began: seconds since 1970; while no agent has begun, when the job printed last.
        stages: that it has come to.
        end: None while it lasts, and where its head was killed.
    """

    id: str
    restart: int = 0
    output: str | None
    printed: tuple[str, ...] = ()
    directory: str | None = None
    logs: tuple[str, ...] = ()
    attach: str | None = None
    began: float
    stages: tuple[JobStage, ...] = ()
    end: JobEnd | None = None

    @property
    def last_sign(self) -> float:
        """When it told of itself last."""
        return self.end.time if self.end is not None else max([self.began, *(stage.time for stage in self.stages)])

    @property
    def message(self) -> str:
        """What it says of its end, or of what it does before an agent begins."""
        return self.end.reason if self.end is not None else "\n".join(self.printed)

    def news(self, now: float) -> str:
        """The last that is known of it."""
        if self.end is not None:
            return f"job {self.id} has ended with exit code {self.end.exit_code}"
        if self.directory is None:
            known = f"it printed this {ago(self.began, now)}" if self.printed else f"it began {ago(self.began, now)}"
            return f"job {self.id}: {known}, and nothing else is known; squeue --job {self.id} says whether it goes on"
        known = f"{self.stages[-1].stage} {ago(self.last_sign, now)}" if self.stages else "nothing is known of it yet"
        return f"job {self.id}: {known}"

    def has(self, attempt: Attempt) -> bool:
        """Whether it is the job of an attempt."""
        return (attempt.job, attempt.restart) == (self.id, self.restart)

    def follows(self, attempt: Attempt) -> bool:
        """Whether it was started after an attempt of another one."""
        return self.began > attempt.time and not self.has(attempt)

    def outlasts(self, attempt: Attempt, written: float) -> bool:
        """Whether the attempt has told nothing since it did; else it waits for the run, or was refused because of it.

        Args:
            attempt: which it follows.
            written: when the run was written last, seconds since 1970.
        """
        return max(written, attempt.end.time if attempt.end else 0.0) <= self.last_sign


_NAME = re.compile(r"(\d+)-(\d+)")
_OUTPUT = re.compile(r"(\d+)(_\d+)?")
_CELL = re.compile(r"cell-(\d+)")
_NODE_FAILURE = re.compile(r"^srun: error: Node failure on (\S+)$", re.MULTILINE)
_TAIL_BYTES = 1 << 16
_LINES, _WIDTH = 3, 200
"""Of what a job printed before its agents: so much is shown."""
_TERMINATED = 143
_END = "end.json"
_ATTACH = "attach"


def last_job(run_dir: Path, prepared: float) -> Job | None:
    """The job that was started last; None without one.

    Args:
        run_dir: of the run.
        prepared: when its configuration was written for a job last, seconds since 1970. A job that has printed before
            and of which no agent has begun is not told from one that has ended: the next one is waited for.
    """
    outputs = _outputs(run_dir)
    found = [path for path in (run_dir / "slurm").glob("*-*") if _NAME.fullmatch(path.name)]
    directory, newest = max(found, key=_number, default=None), max(outputs, default=0)
    if newest > (_number(directory)[0] if directory is not None else 0):
        printed = outputs[newest].stat().st_mtime
        if printed >= prepared:
            file = outputs[newest]
            return Job(id=file.stem, output=str(file), printed=_last_lines(_tail(file)), began=printed)
    return None if directory is None else _read(directory, outputs)


def job_of(run_dir: Path, attempt: Attempt) -> Job | None:
    """The job of an attempt; None of one that had none, or has left nothing."""
    directory = run_dir / "slurm" / f"{attempt.job}-{attempt.restart}"
    return _read(directory, _outputs(run_dir)) if attempt.job is not None and directory.is_dir() else None


def _read(directory: Path, outputs: Mapping[int, Path]) -> Job:
    """A job of which an agent has begun."""
    number, restart = _number(directory)
    attach, output = directory / _ATTACH, _output_of(number, outputs)
    stages = tuple(
        JobStage(stage=str(line["stage"]), time=float(line["time"]))
        for line in read_lines(directory / "times.jsonl")
        if {"stage", "time"} <= line.keys()
    )
    return Job(
        id=str(number),
        restart=restart,
        output=None if output is None else str(output),
        directory=str(directory),
        logs=tuple(sorted((path.name for path in directory.glob("*.log")), key=lambda name: (len(name), name))),
        attach=str(attach) if attach.exists() else None,
        began=stages[0].time if stages else directory.stat().st_mtime,
        stages=stages,
        end=_explained(_end(directory / _END), "" if output is None else _tail(output)),
    )


def _outputs(run_dir: Path) -> dict[int, Path]:
    """What jobs printed, by their numbers; a run of a sweep has it beside its directory, by the run's index."""
    files = [*(run_dir / "slurm").glob("*.out")]
    if cell := _CELL.match(run_dir.name):
        files += (run_dir.parent / "slurm").glob(f"*_{cell[1]}.out")
    return {int(name[1]): file for file in files if (name := _OUTPUT.fullmatch(file.stem))}


def _output_of(job: int, outputs: Mapping[int, Path]) -> Path | None:
    """An array's job has a number of its own, which is the array's or a later one."""
    fitting = [number for number, file in outputs.items() if number == job or (number < job and "_" in file.stem)]
    return outputs[max(fitting)] if fitting else None


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
    """What a file ends with; nothing where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _last_lines(text: str) -> tuple[str, ...]:
    """Without what a terminal would obey."""
    lines = ("".join(filter(str.isprintable, line)).rstrip()[:_WIDTH] for line in text.splitlines())
    return tuple([line for line in lines if line][-_LINES:])
