"""Shows an experiment of NeMo-Run, or runs it to its end."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
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
_SUCCEEDED = "SUCCEEDED"
_PRIVATE = 0o077  # the umask for NeMo-Run's files, which contain the profile's env and setup


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
            after = f", after {', '.join(task.after)}" if task.after else ""
            for name in (f"{task.name}_sbatch.sh", f"{task.name}/scripts/{task.name}.sh"):
                if (directory / name).exists():
                    print(f"# ---- {name}{after}")
                    print((directory / name).read_text(encoding="utf-8").rstrip())


def start(title: str, tasks: Sequence[ExperimentTask], *, detach: bool) -> int:
    """Runs an experiment; returns 1 if a task fails.

    On a cluster, `detach` returns once the jobs are submitted.
    """
    os.umask(_PRIVATE)
    experiment = run.Experiment(title, log_level="WARN")
    executor = tasks[0].executor
    if isinstance(executor, run.SlurmExecutor):
        if not _submit(experiment, executor, tasks, detach=detach):
            return 1
        if detach:
            return 0
    else:
        _run_here(experiment, tasks)
    return _report(experiment, tasks)


def _add(experiment: run.Experiment, tasks: Sequence[ExperimentTask]) -> None:
    for task in tasks:
        script = run.Script(inline=task.script)
        experiment.add(script, executor=task.executor, name=task.name, dependencies=list(task.after))


@contextmanager
def _handling(end: Callable[[int, FrameType | None], NoReturn]) -> Iterator[None]:
    """Calls `end` at SIGINT and SIGTERM; NeMo-Run only waits (run/experiment.py, _wait_for_jobs)."""
    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_here(experiment: run.Experiment, tasks: Sequence[ExperimentTask]) -> None:
    """Runs the tasks on this machine; SIGINT and SIGTERM cancel them."""

    def cancel(number: int, _: FrameType | None) -> NoReturn:
        for ignored in (signal.SIGINT, signal.SIGTERM):
            signal.signal(ignored, signal.SIG_IGN)
        for job in experiment.jobs:
            experiment.cancel(job.id)
        raise SystemExit(128 + number)

    with _handling(cancel), experiment:  # its exit waits for the tasks
        _add(experiment, tasks)
        experiment.run(tail_logs=True)


def _leave(number: int, _: FrameType | None) -> NoReturn:
    """Ends this process without the jobs; threads of NeMo-Run that wait for them would keep it."""
    print("the jobs continue; nemo experiment status and cancel show and end them", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(128 + number)


def _submit(
    experiment: run.Experiment, executor: run.SlurmExecutor, tasks: Sequence[ExperimentTask], *, detach: bool
) -> bool:
    """Submits the tasks and, unless detached, waits for them; returns whether all were submitted."""
    options = [name for name in executor.SBATCH_FLAGS if getattr(executor, name, None) is not None]
    options += executor.additional_parameters or ()
    kept = sbatch_environment([name.replace("_", "-") for name in options])
    for name in set(os.environ) - set(kept):
        del os.environ[name]
    tunnel = executor.tunnel
    try:
        with _handling(_leave), experiment:  # its exit waits for the tasks
            _add(experiment, tasks)
            experiment.console.quiet = True  # a refusal is printed once, below
            experiment.run(detach=detach, tail_logs=not detach)
            experiment.console.quiet = False
    except UnexpectedExit as error:
        message = f"refused: {error.result.command}\n{error.result.stderr.strip()}"
    except _LOST as error:
        place = "this machine"
        if isinstance(tunnel, run.SSHTunnel):
            place = f"{tunnel.user}@{tunnel.host}"
        message = f"submitting from {place} failed: {_cause(error)}"
    else:
        return True
    print(message, file=sys.stderr)
    numbers = [parse_app_handle(job.handle).app_id for job in experiment.jobs if job.handle]
    if numbers:
        cancel = f"scancel {' '.join(numbers)}"
        print(f"submitted before it: {', '.join(numbers)}; to cancel: {cancel}", file=sys.stderr)
    return False


def _report(experiment: run.Experiment, tasks: Sequence[ExperimentTask]) -> int:
    """Prints which tasks have not succeeded, and where to look; returns the exit code."""
    jobs = {job.id: job for job in experiment.jobs}
    failed = 0
    for task in tasks:
        state = jobs[task.name].state.name
        if state == _SUCCEEDED:
            continue
        failed = 1
        where = "its run has not started"
        tunnel = getattr(task.executor, "tunnel", None)
        if isinstance(tunnel, run.SSHTunnel) or os.path.exists(task.run_dir):
            where = f"see megarl status {shlex.quote(task.run_dir)}"
        else:
            # torchx may end before it shows the last output (schedulers/local_scheduler.py, LogIterator).
            output = next(Path(jobs[task.name].executor.job_dir).rglob("combined.log"), None)
            if output is not None:
                where += f"; see {output}"
        print(f"{task.name}: {state}; {where}", file=sys.stderr)
    return failed


def _cause(error: BaseException) -> str:
    """Returns in one line why a connection was lost."""
    if isinstance(error, ThreadException):  # raised for the threads that copy a command's output
        error = error.exceptions[0].value
    if isinstance(error, SystemExit):
        return "the login was refused"
    return " ".join(str(error).split()) or type(error).__name__
