"""Shows an experiment of NeMo-Run, or runs and follows it to its end."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import NoReturn

import nemo_run as run
import paramiko
from invoke.exceptions import ThreadException, UnexpectedExit
from torchx.specs import parse_app_handle

from megarl.launch.submit import sbatch_environment

# A connection is lost, or cannot be made. NeMo-Run's tunnel ends the process where it cannot log in
# (nemo_run/core/tunnel/client.py, SSHTunnel._authenticate).
_LOST = (OSError, EOFError, paramiko.SSHException, ThreadException, SystemExit)
_Tunnel = run.SSHTunnel | run.LocalTunnel
_PENDING = "PENDING"
_COMPLETED = "COMPLETED"
_NOT_ENDED = {
    *(_PENDING, "RUNNING", "SUSPENDED", "REQUEUED", "RESIZING"),
    *("COMPLETING", "CONFIGURING", "SIGNALING", "STAGE_OUT", "STOPPED"),
}
# many users share the accounting: it is asked less and less often
_FIRST_PAUSE_S = 2.0
_LAST_PAUSE_S = 30.0
_LIMIT_S = 120.0
_PRIVATE = 0o077  # the umask for NeMo-Run's files, which contain the profile's env and setup


class AccountingError(RuntimeError):
    """Slurm's accounting does not answer, or cannot be reached."""


@dataclass(frozen=True, kw_only=True)
class ExperimentTask:
    """A run of an experiment: a bash script that starts after the tasks named in `after`."""

    name: str
    script: str
    executor: run.Executor
    after: tuple[str, ...] = ()
    run_dir: str


def show(title: str, tasks: Sequence[ExperimentTask]) -> None:
    """Prints what NeMo-Run would submit or start, and leaves no files."""
    with TemporaryDirectory() as base:
        with run.Experiment(title, base_dir=base, clean_mode=True, log_level="WARN") as experiment:
            _add(experiment, tasks)
            experiment.dryrun(log=False, delete_exp_dir=False)
        directory = Path(experiment.jobs[0].executor.job_dir).parent
        for task in tasks:
            files = (directory / f"{task.name}_sbatch.sh", directory / task.name / "scripts" / f"{task.name}.sh")
            after = f", after {', '.join(task.after)}" if task.after else ""
            for file in (file for file in files if file.exists()):
                text = file.read_text(encoding="utf-8").rstrip()
                print(f"# ---- {file.relative_to(directory)}{after}", text, sep="\n")


def start(title: str, tasks: Sequence[ExperimentTask], *, detach: bool) -> int:
    """Runs an experiment; returns 1 if a task fails. On a cluster, `detach` returns once the jobs are submitted."""
    os.umask(_PRIVATE)
    experiment = run.Experiment(title, log_level="WARN")
    executor = tasks[0].executor
    if isinstance(executor, run.SlurmExecutor):
        return _submit(experiment, executor, tasks, detach=detach)
    with _interruptible(experiment), experiment:  # its exit waits for the tasks
        _add(experiment, tasks)
        experiment.run(tail_logs=True)
    states = {job.id: job.state.name for job in experiment.jobs}
    # torchx may end before it has shown what a task printed last (torchx/schedulers/local_scheduler.py, LogIterator).
    outputs = {job.id: next(Path(job.executor.job_dir).rglob("combined.log"), None) for job in experiment.jobs}
    return _report(tasks, states, succeeded="SUCCEEDED", outputs=outputs)


def _add(experiment: run.Experiment, tasks: Sequence[ExperimentTask]) -> None:
    for task in tasks:
        script = run.Script(inline=task.script)
        experiment.add(script, executor=task.executor, name=task.name, dependencies=list(task.after))


@contextmanager
def _interruptible(experiment: run.Experiment) -> Iterator[None]:
    """Cancels the local tasks at SIGINT or SIGTERM; NeMo-Run only waits (run/experiment.py, _wait_for_jobs)."""

    def end(number: int, _: FrameType | None) -> NoReturn:
        for ignored in before:
            signal.signal(ignored, signal.SIG_IGN)
        for job in experiment.jobs:
            experiment.cancel(job.id)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _submit(
    experiment: run.Experiment, executor: run.SlurmExecutor, tasks: Sequence[ExperimentTask], *, detach: bool
) -> int:
    """Submits the tasks, and follows them unless detached."""
    options = [name for name in executor.SBATCH_FLAGS if getattr(executor, name, None) is not None]
    options += executor.additional_parameters or ()
    kept = sbatch_environment([name.replace("_", "-") for name in options])
    for name in set(os.environ) - set(kept):
        del os.environ[name]
    tunnel = executor.tunnel
    try:
        with experiment:
            _add(experiment, tasks)
            experiment.console.quiet = True  # a refusal is printed once, below
            experiment.run(detach=True)
            experiment.console.quiet = False
    except UnexpectedExit as error:
        message = f"refused: {error.result.command}\n{error.result.stderr.strip()}"
    except _LOST as error:
        place = f"{tunnel.user}@{tunnel.host}" if isinstance(tunnel, run.SSHTunnel) else "this machine"
        message = f"submitting from {place} failed: {_cause(error)}"
    else:
        return 0 if detach else _wait(experiment, experiment.jobs[0].executor.tunnel, tasks)
    print(message, file=sys.stderr)
    if numbers := _numbers(experiment).values():
        print(f"submitted before it: {', '.join(numbers)}; to cancel: scancel {' '.join(numbers)}", file=sys.stderr)
    return 1


def _numbers(experiment: run.Experiment) -> dict[str, str]:
    """Returns the numbers of the submitted jobs by task."""
    return {job.id: parse_app_handle(job.handle).app_id for job in experiment.jobs if job.handle}


def _wait(experiment: run.Experiment, tunnel: _Tunnel, tasks: Sequence[ExperimentTask]) -> int:
    """Follows the jobs of a cluster to their ends; an interrupt does not cancel them."""
    numbers = _numbers(experiment)
    try:
        known = follow(tunnel, numbers)
    except KeyboardInterrupt:
        print("the jobs continue; the commands above show and cancel them", file=sys.stderr)
        return 128 + signal.SIGINT
    except AccountingError as error:
        jobs = ",".join(numbers.values())
        directories = shlex.join(task.run_dir for task in tasks)
        print(f"{error}\nthe jobs continue without this script: {jobs}", file=sys.stderr)
        shown = f"squeue --jobs {jobs} and megarl status {directories} show them"
        print(f"{shown}; where Slurm has no accounting, submit with --detach", file=sys.stderr)
        return 1
    return _report(tasks, known, succeeded=_COMPLETED)


def _report(
    tasks: Sequence[ExperimentTask],
    states: Mapping[str, str],
    *,
    succeeded: str,
    outputs: Mapping[str, Path | None] | None = None,
) -> int:
    """Prints which tasks have not succeeded, and where to look; returns the exit code."""
    outputs = outputs or {}
    failed = [task for task in tasks if states.get(task.name) != succeeded]
    for task in failed:
        remote = isinstance(task.executor, run.SlurmExecutor) and isinstance(task.executor.tunnel, run.SSHTunnel)
        started = remote or os.path.exists(task.run_dir)
        where = f"see megarl status {shlex.quote(task.run_dir)}" if started else "its run has not started"
        if not started and outputs.get(task.name):
            where += f"; see {outputs[task.name]}"
        print(f"{task.name}: {states.get(task.name)}; {where}", file=sys.stderr)
    return 1 if failed else 0


def follow(
    tunnel: _Tunnel, numbers: Mapping[str, str], *, pause_s: float = _FIRST_PAUSE_S, limit_s: float = _LIMIT_S
) -> dict[str, str]:
    """Prints changes of the jobs' states until all have ended; returns the last states, or raises AccountingError.

    NeMo-Run 0.11 would cancel a job whose accounting fails for a minute, and give up on one that the accounting has not
    noted after ten seconds (run/torchx_backend/launcher.py, wait_and_exit).
    """
    known: dict[str, str] = {}
    silent_since: float | None = None
    while True:
        try:
            found = job_states(tunnel, numbers)
            silent_since = None
        except AccountingError as error:
            found = known
            if silent_since is None:
                silent_since = time.monotonic()
                print(f"{error}; trying again", file=sys.stderr)
            elif time.monotonic() - silent_since > limit_s:
                raise
        for task, state in found.items():
            if known.get(task) != state:
                print(f"{time.strftime('%H:%M:%S')} {task}: {state}", flush=True)
        known = found
        if known and _NOT_ENDED.isdisjoint(known.values()):
            return known
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.1, _LAST_PAUSE_S)


def job_states(tunnel: _Tunnel, numbers: Mapping[str, str]) -> dict[str, str]:
    """Returns each job's state by task: pending if the accounting does not know it. Raises AccountingError."""
    command = f"sacct -X -n -P -o JobIDRaw,State -j {','.join(numbers.values())}"
    try:
        done = tunnel.run(command, hide=True, warn=True, in_stream=False)
    except _LOST as error:
        raise AccountingError(f"Slurm's accounting cannot be reached: {_cause(error)}") from error
    if done.failed:
        said = " ".join(done.stderr.split()) or f"exit code {done.exited}"
        raise AccountingError(f"Slurm's accounting does not answer: sacct: {said}")
    rows = (line.partition("|") for line in done.stdout.splitlines())
    found = {number: state.split()[0] for number, _, state in rows if state.strip()}  # CANCELLED of "CANCELLED by 0"
    return {task: found.get(number, _PENDING) for task, number in numbers.items()}


def _cause(error: BaseException) -> str:
    """Returns in one line why a connection was lost."""
    if isinstance(error, ThreadException):  # raised for the threads that copy a command's output
        error = error.exceptions[0].value
    said = "the login was refused" if isinstance(error, SystemExit) else " ".join(str(error).split())
    return said or type(error).__name__
