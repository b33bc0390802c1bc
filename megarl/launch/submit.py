"""Submits a request's jobs to Slurm."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from shlex import join, quote

import typer

from megarl.config import ConfigError, save
from megarl.files import write_durably
from megarl.launch.planning import PlannedJob, RefusedError, plan
from megarl.launch.profile import found_profile
from megarl.launch.render import BatchJob, render
from megarl.launch.request import LaunchRequest, unwritable

_CLUSTER_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_CONF_SERVER")  # the others belong to a job
_SBATCH_VARIABLES = {
    "time": "timelimit",
    "array": "array-inx",
    "mem": "mem-per-node",
    "no-requeue": "requeue",
    "requeue": "no-requeue",
}
_JOB_ID = re.compile(r"^(\d+)(?:;\S+)?$", re.MULTILINE)  # sbatch --parsable adds the name of one of several clusters


def launch(request: LaunchRequest) -> int:
    """Submits or shows a request's jobs; returns 2 for a mistake, before anything is written, and 1 if sbatch fails."""
    try:
        planned = plan(request)
        for each in planned:
            _write(each)
    except (RefusedError, ConfigError) as error:
        typer.echo(str(error), err=True)
        return 2
    typer.echo("".join(f"{remark}\n" for each in planned for remark in each.remarks), err=True, nl=False)
    jobs = [each.job for each in planned]
    return _show(request, jobs) if request.dry_run else _submit(request, jobs)


def _write(planned: PlannedJob) -> None:
    """Writes the script and the resolved configuration, so that later edits do not change the job."""
    try:
        planned.job.directory.mkdir(parents=True, exist_ok=True)
        save(planned.config, planned.job.config)
        write_durably(planned.job.script, render(planned.job), mode=0o700)  # a profile may hold secrets
    except OSError as error:
        problem = unwritable(planned.job.run_dir, error, f"{error.filename}: ")
        raise ConfigError([problem], "command line") from None


def _show(request: LaunchRequest, jobs: Sequence[BatchJob]) -> int:
    """Prints the scripts to stdout, and how to submit them to stderr."""
    for index, job in enumerate(jobs):
        before = f"JOB-{index}" if index else None
        number = f" ({before} is the number of the previous job)" if before else ""
        typer.echo(render(job))
        typer.echo(f"written to {job.script}; to submit: {join(_command(request, job, before))}{number}", err=True)
    typer.echo(_origin(request), err=True)
    return 0


def _origin(request: LaunchRequest) -> str:
    file = found_profile(request.profile)
    given = f"from the command line: {', '.join(request.settings)}; " if request.settings else ""
    return f"settings of the cluster: {given}{'the rest from ' if given and file else ''}{file or 'no profile'}"


def _submit(request: LaunchRequest, jobs: Sequence[BatchJob]) -> int:
    """Submits the jobs; each starts after the previous one has succeeded."""
    numbers: list[str] = []
    for job in jobs:
        command = _command(request, job, numbers[-1] if numbers else None)
        options = script_options(job.script.read_text(encoding="utf-8"))
        env = sbatch_environment(options)
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        typer.echo(f"{done.stderr.strip()}\n" * bool(done.stderr.strip()), err=True, nl=False)
        answers: list[str] = _JOB_ID.findall(done.stdout)
        if done.returncode != 0 or not answers:
            what = "refused by sbatch" if done.returncode else "sbatch has answered without the number of a job"
            before = f"\nsubmitted before it: {', '.join(numbers)}; to cancel: scancel {' '.join(numbers)}"
            typer.echo(f"{what}: {job.script}\n{_origin(request)}{before * bool(numbers)}", err=True)
            return 1
        numbers.append(answers[-1])
        typer.echo("\n".join(_summary(job, numbers)))
    return 0


def _command(request: LaunchRequest, job: BatchJob, before: str | None) -> list[str]:
    dependency = request.dependency if before is None else f"afterok:{before}"
    waits = [] if dependency is None else [f"--dependency={dependency}"]
    return ["sbatch", "--parsable", *waits, os.fspath(job.script)]


def script_options(script: str) -> list[str]:
    """Returns the names of the options on a script's #SBATCH lines, without dashes and values."""
    lines = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    return [line.strip('"').removeprefix("--").partition("=")[0] for line in lines]


def sbatch_environment(options: Sequence[str]) -> dict[str, str]:
    """Returns this process's environment without variables of another job, and of sbatch that override `options`.

    Args:
        options: names of sbatch's options, without dashes.
    """
    overriding = {f"SBATCH_{_SBATCH_VARIABLES.get(name, name).upper().replace('-', '_')}" for name in options}
    return {
        name: value
        for name, value in os.environ.items()
        if name not in overriding and (not name.startswith("SLURM_") or name in _CLUSTER_VARIABLES)
    }


def _summary(job: BatchJob, numbers: Sequence[str]) -> Iterator[str]:
    *before, number = numbers
    after = f", after {before[-1]}" if before else ""
    output = job.directory / f"{number}.out"
    nodes = "1 node" if job.nodes == 1 else f"{job.nodes} nodes"
    yield f"job {number}: {job.title}, {nodes}{after}"
    yield f"  script  {job.script}"
    yield f"  output  {output}"
    yield f"  logs    {job.directory}/{number}-0"
    yield f"  follow  squeue --job {number}; tail -F {quote(str(output))}; megarl status {quote(str(job.run_dir))}"
    yield f"  cancel  scancel {number}"
