"""An experiment of NeMo-Run: shown, or run to its end, with an exit code that says how it ended."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import nemo_run as run
from invoke.exceptions import UnexpectedExit
from nemo_run.config import get_nemorun_home

from launchers.accounting import COMPLETED, LOST, AccountingError, followed, reason
from megarl.launch.slurm import environment

_PRIVATE = 0o077
"""The umask for NeMo-Run's files: they have what the profile says, which others must not read."""
_SHOWN = 4000
"""Characters of a failed task's errors that are shown."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A run of an experiment.

    Args:
        name: of its own in the experiment.
        script: lines of bash.
        executor: what runs them.
        after: names of tasks that end before it begins.
        run_dir: of the run, for people.
    """

    name: str
    script: str
    executor: run.Executor
    after: tuple[str, ...] = ()
    run_dir: str


def show(title: str, tasks: Sequence[Task]) -> None:
    """Writes what NeMo-Run would submit, or start here, to the standard output, and leaves nothing."""
    os.umask(_PRIVATE)
    home = Path(get_nemorun_home())
    made = [path for path in (home / "experiments" / title, home / "experiments", home) if not path.exists()]
    with redirect_stdout(sys.stderr), run.Experiment(title, log_level="WARN") as experiment:
        _add(experiment, tasks)
        experiment.dryrun(log=False, delete_exp_dir=False)
    directory = Path(experiment.jobs[0].executor.job_dir).parent
    for task in tasks:
        files = (directory / f"{task.name}_sbatch.sh", directory / task.name / "scripts" / f"{task.name}.sh")
        after = f", after {', '.join(task.after)}" if task.after else ""
        for file in (file for file in files if file.exists()):
            print(f"# ---- {file.relative_to(directory)}{after}", file.read_text(encoding="utf-8").rstrip(), sep="\n")
    shutil.rmtree(directory)
    for path in made:
        with suppress(OSError):  # somebody else has put something there
            path.rmdir()


def start(title: str, tasks: Sequence[Task], *, detach: bool) -> int:
    """Runs an experiment on this machine or on a cluster.

    Args:
        title: of the experiment.
        tasks: earlier ones first.
        detach: return when the jobs are submitted.

    Returns:
        0 where all tasks have succeeded, or are submitted; 1 where one has not.
    """
    os.umask(_PRIVATE)
    experiment, executor = run.Experiment(title, log_level="WARN"), tasks[0].executor
    if isinstance(executor, run.SlurmExecutor):
        for name in set(os.environ) - set(environment(_directives(executor))):
            del os.environ[name]
        try:
            with experiment:
                _add(experiment, tasks)
                experiment.console.quiet = True  # a refusal is told once, below
                experiment.run(detach=True)
                experiment.console.quiet = False
        except UnexpectedExit as error:
            return _refused(experiment, f"refused: {error.result.command}\n{error.result.stderr.strip()}")
        except LOST as error:
            return _refused(experiment, f"submitting from {_place(executor)} failed: {reason(error)}")
        return 0 if detach else _waited(experiment, tasks)
    with _interruptible(experiment), experiment:  # which waits for the tasks at its end
        _add(experiment, tasks)
        experiment.run(tail_logs=True)
    states = {job.id: job.state.name for job in experiment.jobs}
    for job in (job for job in experiment.jobs if states[job.id] != "SUCCEEDED"):
        _show_errors(Path(job.executor.job_dir))
    return _told(tasks, states, succeeded="SUCCEEDED")


def _directives(executor: run.SlurmExecutor) -> str:
    """The options that NeMo-Run writes into a script."""
    given = [name for name in executor.SBATCH_FLAGS if getattr(executor, name, None) is not None]
    return "\n".join(
        f"#SBATCH --{name.replace('_', '-')}" for name in (*given, *(executor.additional_parameters or ()))
    )


def _refused(experiment: run.Experiment, message: str) -> int:
    """Says why not all jobs are submitted, and which are."""
    print(message, file=sys.stderr)
    numbers = _numbers(experiment).values()
    if numbers:
        print(f"submitted before it: {', '.join(numbers)}; to cancel: scancel {' '.join(numbers)}", file=sys.stderr)
    return 1


def _place(executor: run.SlurmExecutor) -> str:
    """From where jobs are submitted."""
    tunnel = executor.tunnel
    return f"{tunnel.user}@{tunnel.host}" if isinstance(tunnel, run.SSHTunnel) else "this machine"


def _elsewhere(executor: run.Executor) -> bool:
    """Whether the runs are where this machine sees no files."""
    return isinstance(executor, run.SlurmExecutor) and isinstance(executor.tunnel, run.SSHTunnel)


def _numbers(experiment: run.Experiment) -> dict[str, str]:
    """Those of the submitted jobs, by task."""
    return {job.id: job.handle.partition("://")[2].split("/")[1] for job in experiment.jobs if job.handle}


def _add(experiment: run.Experiment, tasks: Sequence[Task]) -> None:
    for task in tasks:
        script = run.Script(inline=task.script)
        experiment.add(script, executor=task.executor, name=task.name, dependencies=list(task.after))


@contextmanager
def _interruptible(experiment: run.Experiment) -> Iterator[None]:
    """Ends the tasks of this machine with an interrupt or SIGTERM; NeMo-Run alone would go on until they end."""

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


def _show_errors(directory: Path) -> None:
    """Shows the end of what a task of this machine has said: NeMo-Run 0.4 loses what is said last."""
    for file in directory.glob("nemo_run/*/*/*/stderr.log"):
        print(f"{directory.name}, the end of {file}:", file.read_text(errors="replace")[-_SHOWN:], file=sys.stderr)


def _waited(experiment: run.Experiment, tasks: Sequence[Task]) -> int:
    """Follows the jobs of a cluster to their ends; an interrupt leaves them alone."""
    numbers, executor = _numbers(experiment), experiment.jobs[0].executor
    assert isinstance(executor, run.SlurmExecutor)
    try:
        known = followed(executor.tunnel, numbers)
    except KeyboardInterrupt:
        print("the jobs go on; the commands above tell of them, and cancel them", file=sys.stderr)
        return 128 + signal.SIGINT
    except AccountingError as error:
        jobs, directories = ",".join(numbers.values()), shlex.join(task.run_dir for task in tasks)
        print(
            f"{error}\nthe jobs go on, and are not waited for: {jobs}\n"
            f"squeue --jobs {jobs} and megarl status {directories} tell of them; "
            "where Slurm has no accounting, submit with --detach",
            file=sys.stderr,
        )
        return 1
    return _told(tasks, known, succeeded=COMPLETED)


def _told(tasks: Sequence[Task], states: Mapping[str, str], *, succeeded: str) -> int:
    """Says which tasks have not succeeded, and where to look."""
    failed = [task for task in tasks if states.get(task.name) != succeeded]
    for task in failed:
        begun = _elsewhere(task.executor) or os.path.exists(task.run_dir)
        where = f"see megarl status {shlex.quote(task.run_dir)}" if begun else "its run has not begun"
        print(f"{task.name}: {states.get(task.name)}; {where}", file=sys.stderr)
    return 1 if failed else 0
