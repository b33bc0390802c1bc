"""The Slurm jobs of a run: submissions, progress, logs and ends. Times are seconds since 1970."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.files import open_file, read_json, read_lines, write_durably
from megarl.run.attempts import Attempt
from megarl.run.status.format import ago

_FOLDER = "slurm"
_SUBMITTED = "submitted.json"


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A submission to Slurm. `job` is its number; None if only its configuration is known."""

    job: str | None
    time: float


def record_submission(folder: Path, job: str) -> None:
    """Writes the number of a submitted job into the folder of its configuration, RUN_DIR/slurm.

    An error is only printed, as the job exists.
    """
    try:
        write_durably(folder / _SUBMITTED, json.dumps({"job": job}) + "\n")
    except OSError as error:
        print(f"{folder / _SUBMITTED}: {error.strerror}; megarl status will not know of job {job}", file=sys.stderr)


def last_submission(run_dir: Path) -> Submission | None:
    """Returns the recorded submission, with the time of its file."""
    file = run_dir / _FOLDER / _SUBMITTED
    with suppress(OSError, ValueError, KeyError, TypeError):  # missing or unreadable
        return Submission(job=read_json(file)["job"], time=file.stat().st_mtime)
    return None


def prepared_configs(run_dir: Path) -> list[Path]:
    """Returns the configurations that were written for a cluster, the newest first; they precede the run."""
    found = (run_dir / _FOLDER).glob("config-*.yaml")
    return sorted(found, key=lambda file: file.stat().st_mtime, reverse=True)


@dataclass(frozen=True, kw_only=True)
class JobStage:
    """A stage that a job has reached."""

    stage: str
    time: float


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """How a job ended, as its head node reports; `node` is the node at fault, if any.

    Args:
        exit_code: 128 plus the number of the signal that ended it, if one did.
    """

    time: float
    exit_code: int
    reason: str
    node: str | None


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """A start of a Slurm job. No node agent has started while `directory` is None.

    Args:
        id: its number.
        restart: times that Slurm had restarted it.
        output: file with its output, if any.
        printed: the last lines of it, before an agent has started.
        directory: of its logs.
        logs: names of the files in it.
        attach: command that opens a shell in the job, if any.
        began: before an agent has started, the time of the last output.
        end: None while it runs, or if its head was killed.
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
        """The time of the last known event."""
        return self.end.time if self.end is not None else max([self.began, *(stage.time for stage in self.stages)])

    @property
    def message(self) -> str:
        """The reason of its end, or its output before an agent started."""
        return self.end.reason if self.end is not None else "\n".join(self.printed)

    def news(self, now: float) -> str:
        """Describes the last known event."""
        if self.end is not None:
            return f"job {self.id} has ended with exit code {self.end.exit_code}"
        if self.directory is None:
            known = f"it printed this {ago(self.began, now)}" if self.printed else f"it began {ago(self.began, now)}"
            return f"job {self.id}: {known}, and nothing else is known; squeue --job {self.id} shows whether it runs"
        known = f"{self.stages[-1].stage} {ago(self.last_sign, now)}" if self.stages else "nothing is known of it yet"
        return f"job {self.id}: {known}"

    def has(self, attempt: Attempt) -> bool:
        """Whether the attempt ran in this job."""
        return (attempt.job, attempt.restart) == (self.id, self.restart)

    def follows(self, attempt: Attempt) -> bool:
        """Whether it was started after an attempt of another job."""
        return self.began > attempt.time and not self.has(attempt)

    def outlasts(self, attempt: Attempt, written: float) -> bool:
        """Whether the job's last sign is later than the last write to the run, at `written`.

        Otherwise the job waits for the attempt that it follows, or was refused because of it.
        """
        return max(written, attempt.end.time if attempt.end else 0.0) <= self.last_sign


_NAME = re.compile(r"(\d+)-(\d+)")
_OUTPUT = re.compile(r"(\d+)(_\d+)?")
_CELL = re.compile(r"cell-(\d+)")
_NODE_FAILURE = re.compile(r"^srun: error: Node failure on (\S+)$", re.MULTILINE)
_TAIL_BYTES = 1 << 16
# of the output before the agents start
_LINES = 3
_WIDTH = 200
_TERMINATED = 143


def find_jobs(
    run_dir: Path, attempts: Sequence[Attempt], written: float, *, resumable: bool
) -> tuple[JobStatus | None, JobStatus | None, Submission | None]:
    """Reads the jobs of a run.

    Args:
        written: the last write to the run.
        resumable: a later job may resume the run: no process has it now, and it is not finished.

    Returns:
        The job that the run's state refers to; a later one that does not have the run; the last submission, if nothing
        has started since.
    """
    prepared = max((file.stat().st_mtime for file in prepared_configs(run_dir)), default=0.0)
    current = _last_job(run_dir, prepared)
    newer = None
    if attempts:
        attempt = attempts[-1]
        last = current
        if last is None or not last.follows(attempt):
            current = _attempt_job(run_dir, attempt)
        elif not (resumable and last.outlasts(attempt, written)):
            current = _attempt_job(run_dir, attempt)
            newer = last
    jobs = [job for job in (current, newer) if job is not None]
    started = max([*(attempt.time for attempt in attempts), *(job.began for job in jobs)], default=0.0)
    submitted = last_submission(run_dir)
    if submitted is None or submitted.time <= started or submitted.job in [job.id for job in jobs]:
        submitted = Submission(job=None, time=prepared) if prepared > started else None
    return current, newer, submitted


def _last_job(run_dir: Path, prepared: float) -> JobStatus | None:
    """Returns the job that was started last.

    A job without an agent that last printed before `prepared`, the last write of a configuration for a job, may have
    ended: it is not reported.
    """
    outputs = _outputs(run_dir)
    found = [path for path in (run_dir / "slurm").glob("*-*") if _NAME.fullmatch(path.name)]
    directory = max(found, key=_number, default=None)
    newest = max(outputs, default=0)
    if newest > (_number(directory)[0] if directory is not None else 0):
        file = outputs[newest]
        printed = file.stat().st_mtime
        if printed >= prepared:
            return JobStatus(id=file.stem, output=str(file), printed=_last_lines(_tail(file)), began=printed)
    return None if directory is None else _read_job(directory, outputs)


def _attempt_job(run_dir: Path, attempt: Attempt) -> JobStatus | None:
    directory = run_dir / "slurm" / f"{attempt.job}-{attempt.restart}"
    return _read_job(directory, _outputs(run_dir)) if attempt.job is not None and directory.is_dir() else None


def _read_job(directory: Path, outputs: Mapping[int, Path]) -> JobStatus:
    """Reads a job whose agent has started."""
    number, restart = _number(directory)
    attach = directory / "attach"
    output = _output_of(number, outputs)
    stages = tuple(
        JobStage(stage=str(line["stage"]), time=float(line["time"]))
        for line in read_lines(directory / "times.jsonl")
        if {"stage", "time"} <= line.keys()
    )
    return JobStatus(
        id=str(number),
        restart=restart,
        output=None if output is None else str(output),
        directory=str(directory),
        logs=tuple(sorted((path.name for path in directory.glob("*.log")), key=lambda name: (len(name), name))),
        attach=str(attach) if attach.exists() else None,
        began=stages[0].time if stages else directory.stat().st_mtime,
        stages=stages,
        end=_read_end(directory / "end.json", output),
    )


def _outputs(run_dir: Path) -> dict[int, Path]:
    """Returns the output files by job number; that of a sweep's run is beside its directory, named by its index."""
    files = [*(run_dir / "slurm").glob("*.out")]
    if cell := _CELL.match(run_dir.name):
        files += (run_dir.parent / "slurm").glob(f"*_{cell[1]}.out")
    return {int(name[1]): file for file in files if (name := _OUTPUT.fullmatch(file.stem))}


def _output_of(job: int, outputs: Mapping[int, Path]) -> Path | None:
    """Returns the output of a job, whose number is the array's or a later one if it belongs to an array."""
    fitting = [number for number, file in outputs.items() if number == job or (number < job and "_" in file.stem)]
    return outputs[max(fitting)] if fitting else None


def _number(directory: Path) -> tuple[int, int]:
    number, _, restart = directory.name.partition("-")
    return int(number), int(restart)


def _read_end(path: Path, output: Path | None) -> JobEnd | None:
    """Reads the end of a job. If a node failed, the head gets SIGTERM, and only srun's output says so."""
    try:
        fields: dict[str, Any] = read_json(path)
        code = int(fields["exit_code"])
        reason = str(fields["reason"])
        node = fields.get("node")
        end = JobEnd(time=path.stat().st_mtime, exit_code=code, reason=reason, node=node)
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):  # missing or incomplete
        return None
    failed = _NODE_FAILURE.findall(_tail(output)) if end.exit_code == _TERMINATED and output is not None else []
    return replace(end, node=failed[0], reason=f"{end.reason}, as node {failed[0]} has failed") if failed else end


def _tail(path: Path) -> str:
    """Returns the end of a file; empty if it cannot be read."""
    try:
        with open_file(path) as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _last_lines(text: str) -> tuple[str, ...]:
    """Returns the last lines, without control characters."""
    lines = ("".join(filter(str.isprintable, line)).rstrip()[:_WIDTH] for line in text.splitlines())
    return tuple([line for line in lines if line][-_LINES:])
