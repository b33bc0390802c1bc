"""Submits a request's jobs to Slurm."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from shlex import join, quote

import typer

from megarl.config import ConfigError, RunConfig, save
from megarl.files import write_durably
from megarl.launch.planning import RefusedError, plan
from megarl.launch.render import BatchJob, render
from megarl.launch.request import LaunchRequest, unwritable
from megarl.texts import counted

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
        planned, remarks = plan(request)
        for job, config in planned:
            _write(job, config)
    except (RefusedError, ConfigError) as error:
        typer.echo(str(error), err=True)
        return 2
    for remark in remarks:
        typer.echo(remark, err=True)
    jobs = [job for job, _ in planned]
    if request.dry_run:
        _show(request, jobs)
        return 0
    return _submit(request, jobs)


def _write(job: BatchJob, config: RunConfig) -> None:
    """Writes the script and the resolved configuration, so that later edits do not change the job."""
    try:
        job.directory.mkdir(parents=True, exist_ok=True)
        save(config, job.config)
        write_durably(job.script, render(job), mode=0o700)  # a profile may hold secrets
    except OSError as error:
        problem = unwritable(job.run_dir, error, f"{error.filename}: ")
        raise ConfigError([problem], "command line") from None


def _show(request: LaunchRequest, jobs: Sequence[BatchJob]) -> None:
    """Prints the scripts to stdout, and how to submit them to stderr."""
    dependency = request.dependency
    number = ""
    for index, job in enumerate(jobs, start=1):
        command = join(_command(job, dependency))
        typer.echo(render(job))
        typer.echo(f"written to {job.script}; to submit: {command}{number}", err=True)
        dependency = f"afterok:JOB-{index}"
        number = f" (JOB-{index} is the number of the previous job)"


def _submit(request: LaunchRequest, jobs: Sequence[BatchJob]) -> int:
    """Submits the jobs; each starts after the previous one has succeeded."""
    numbers: list[str] = []
    dependency = request.dependency
    for job in jobs:
        command = _command(job, dependency)
        options = re.findall(r'^#SBATCH "?--([a-z-]+)', render(job), re.MULTILINE)
        env = sbatch_environment(options)
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.stderr.strip():
            typer.echo(done.stderr.strip(), err=True)
        answers: list[str] = _JOB_ID.findall(done.stdout)
        if done.returncode == 0 and answers:
            _report(job, answers[-1], numbers)
            numbers.append(answers[-1])
            dependency = f"afterok:{answers[-1]}"
            continue
        what = "sbatch has answered without the number of a job"
        if done.returncode != 0:
            what = "refused by sbatch"
        typer.echo(f"{what}: {job.script}", err=True)
        if numbers:
            cancel = f"scancel {' '.join(numbers)}"
            typer.echo(f"submitted before it: {', '.join(numbers)}; to cancel: {cancel}", err=True)
        return 1
    return 0


def _command(job: BatchJob, dependency: str | None) -> list[str]:
    waits = [] if dependency is None else [f"--dependency={dependency}"]
    return ["sbatch", "--parsable", *waits, os.fspath(job.script)]


def sbatch_environment(options: Sequence[str]) -> dict[str, str]:
    """Returns this process's environment without variables of another job, and those that override `options`.

    Args:
        options: names of sbatch's options, without dashes.
    """
    environment = dict(os.environ)
    for option in options:
        variable = _SBATCH_VARIABLES.get(option, option)
        environment.pop(f"SBATCH_{variable.upper().replace('-', '_')}", None)
    for name in os.environ:
        if name.startswith("SLURM_") and name not in _CLUSTER_VARIABLES:
            del environment[name]
    return environment


def _report(job: BatchJob, number: str, before: Sequence[str]) -> None:
    """Prints what a submitted job is, and where to look; `before` are the numbers of earlier jobs."""
    heading = f"job {number}: {job.title}, {counted(job.nodes, 'node')}"
    if before:
        heading += f", after {before[-1]}"
    output = job.directory / f"{number}.out"
    status = f"megarl status {quote(str(job.run_dir))}"
    typer.echo(
        f"{heading}\n"
        f"  script  {job.script}\n"
        f"  output  {output}\n"
        f"  logs    {job.directory}/{number}-0\n"
        f"  follow  squeue --job {number}; tail -F {quote(str(output))}; {status}\n"
        f"  cancel  scancel {number}"
    )
