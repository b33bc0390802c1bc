"""A submission to Slurm: its files, its jobs, and what is told of them."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from shlex import join, quote

import typer

from megarl.config import ConfigError, Problem, save
from megarl.files import write_durably
from megarl.launch.planning import Planned, RefusedError, plan
from megarl.launch.profile import found_profile
from megarl.launch.render import Job, render
from megarl.launch.request import Request
from megarl.run.status.jobs import note

_OF_THE_CLUSTER = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_CONF_SERVER")
"""Variables of Slurm that say where the cluster is; others are of a job that one may be in."""
_SBATCH_VARIABLES = {"time": "timelimit", "array": "array-inx", "mem": "mem-per-node", "no-requeue": "requeue"}
"""Options of sbatch whose variables are called otherwise; see its manual."""
_NUMBER = re.compile(r"^(\d+)(?:;\S+)?$", re.MULTILINE)
"""What sbatch --parsable answers: the number of the job and, of several clusters, the name of one."""


def launch(request: Request) -> int:
    """Writes the files of a request's jobs and submits them, or shows them.

    Returns:
        The exit code: 2 for a mistake of the user, after which nothing is written; 1 where Slurm refuses a job.
    """
    try:
        planned = plan(request)
        for job in planned:
            _write(job)
    except (RefusedError, ConfigError) as error:
        typer.echo(str(error), err=True)
        return 2
    typer.echo("".join(f"{remark}\n" for each in planned for remark in each.remarks), err=True, nl=False)
    jobs = [each.job for each in planned]
    return _show(request, jobs) if request.dry_run else _submit(request, jobs)


def _write(planned: Planned) -> None:
    """The script, and the configuration of each run as it is now: what is edited later does not change the job.

    Raises:
        ConfigError: the directory of a run cannot be written.
    """
    try:
        for config, file in zip(planned.configs, planned.job.configs, strict=True):
            file.parent.mkdir(parents=True, exist_ok=True)
            save(config, file)
        planned.job.directory.mkdir(parents=True, exist_ok=True)
        write_durably(planned.job.script, render(planned.job), mode=0o700)  # a profile may hold what is secret
    except OSError as error:
        rule, fix = f"can be written ({error.filename}: {error.strerror})", "choose another run.dir"
        problem = Problem(field="run.dir", value=str(planned.job.run_dir), rule=rule, fix=fix)
        raise ConfigError([problem], "command line") from None


def _show(request: Request, jobs: Sequence[Job]) -> int:
    """Scripts to the standard output, the rest beside."""
    for index, job in enumerate(jobs):
        before = f"JOB-{index}" if index else None
        number = f" ({before} is the number of the job before)" if before else ""
        typer.echo(render(job))
        typer.echo(f"written to {job.script}; to submit: {join(_command(request, job, before))}{number}", err=True)
    typer.echo(_origin(request), err=True)
    return 0


def _origin(request: Request) -> str:
    """From where the settings of the cluster are."""
    file = found_profile(request.profile)
    if not request.settings:
        return f"settings of the cluster: {file or 'no profile'}"
    rest = f"; the rest from {file}" if file else "; no profile"
    return f"settings of the cluster: from the command line: {', '.join(request.settings)}{rest}"


def _submit(request: Request, jobs: Sequence[Job]) -> int:
    """One job after the other, each but the first after the one before has ended well."""
    numbers: list[str] = []
    for job in jobs:
        command = _command(request, job, numbers[-1] if numbers else None)
        done = subprocess.run(
            command,
            env=environment(job.script.read_text(encoding="utf-8")),
            capture_output=True,
            text=True,
            check=False,
        )
        typer.echo(f"{done.stderr.strip()}\n" * bool(done.stderr.strip()), err=True, nl=False)
        answers: list[str] = _NUMBER.findall(done.stdout)
        if done.returncode != 0 or not answers:
            what = "refused by sbatch" if done.returncode else "sbatch has answered without the number of a job"
            before = f"\nsubmitted before it: {', '.join(numbers)}; to cancel: scancel {' '.join(numbers)}"
            typer.echo(f"{what}: {job.script}\n{_origin(request)}{before * bool(numbers)}", err=True)
            return 1
        numbers.append(answers[-1])
        _note(job, answers[-1])
        typer.echo("\n".join(_told(job, numbers)))
    return 0


def _note(job: Job, number: str) -> None:
    """Beside the configuration of each run that the job has left to do; a sweep's have an index in its array."""
    for index, file in enumerate(job.configs):
        if index not in job.finished:
            note(file.parent, f"{number}_{index}" if job.cells else number)


def _command(request: Request, job: Job, before: str | None) -> list[str]:
    dependency = request.dependency if before is None else f"afterok:{before}"
    waits = [] if dependency is None else [f"--dependency={dependency}"]
    return ["sbatch", "--parsable", *waits, os.fspath(job.script)]


def environment(script: str) -> dict[str, str]:
    """This process's own, but for what would make another job of a script.

    Variables of sbatch go before the lines of a script: those of options that the script has are left out. So is what
    Slurm has set in this process, where it is a job's itself: the new job is none of its steps.
    """
    said: list[str] = re.findall(r'^#SBATCH "?--([a-z-]+)', script, re.MULTILINE)
    before = {f"SBATCH_{_SBATCH_VARIABLES.get(name, name).upper().replace('-', '_')}" for name in said}
    return {
        name: value
        for name, value in os.environ.items()
        if name not in before and (not name.startswith("SLURM_") or name in _OF_THE_CLUSTER)
    }


def _told(job: Job, numbers: Sequence[str]) -> Iterator[str]:
    """What a user wants to know of a job that is queued."""
    *before, number = numbers
    after = f", after {before[-1]}" if before else ""
    below, each = (job.run_dir / "CELL", "JOB") if job.cells else (job.run_dir, number)
    output = job.directory / (f"{number}_INDEX.out" if job.cells else f"{number}.out")
    followed = f"{quote(str(job.directory))}/{number}_*.out" if job.cells else quote(str(output))
    yield f"job {number}: {job.title}, {job.nodes} node{'s' * (job.nodes > 1)}{after}"
    yield f"  script  {job.script}"
    yield f"  output  {output}"
    yield f"  logs    {below / 'slurm'}/{each}-0"
    yield f"  follow  squeue --job {number}; tail -F {followed}; megarl status {quote(str(job.run_dir))}"
    yield f"  cancel  scancel {number}"
