"""From a script's command line to the tasks of an experiment, or to every problem of the request."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import nemo_run as run
import typer

from launchers import executors
from launchers.experiment import ExperimentTask, show, start
from megarl.config import ConfigError, Problem
from megarl.config.problems import shown
from megarl.launch.cli import Account, GPUsPerNode, Nodes, Partition, ProfileOption, Python, Time, profile_settings
from megarl.launch.planning import Planned, RefusedError, plan
from megarl.launch.profile import SSH
from megarl.launch.render import BatchJob
from megarl.launch.request import LaunchRequest, split_arguments

_ENVIRONMENT = Path(".venv/bin/python")  # the interpreter of make setup
_HAS_TORCH = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None and 'it has no torch')"

_CONFIGS = typer.Argument(
    metavar="CONFIG... [KEY.PATH=VALUE]...",
    show_default=False,
    help="YAML file of the run, or of each run in their order, and settings to override in all of them.",
)
_EXECUTOR = typer.Option(help="Where the tasks run: on this machine, or on the profile's cluster.")
_NAME = typer.Option(help="Name of the experiment; default: that of the last run.dir.")
_DRY_RUN = typer.Option("--dry-run", help="Show the scripts; write and submit nothing.")
_DETACH = typer.Option("--detach", help="Return once the jobs are submitted.")


def make_app(description: str, *, chain: bool) -> typer.Typer:
    """Returns the command of a script; a chain has several runs, which follow each other."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    @app.command(help=description)
    def main(
        arguments: Annotated[list[str], _CONFIGS],
        executor: Annotated[Literal["local", "slurm"], _EXECUTOR] = "local",
        profile: ProfileOption = None,
        name: Annotated[str | None, _NAME] = None,
        nodes: Nodes = None,
        gpus_per_node: GPUsPerNode = None,
        time: Time = None,
        partition: Partition = None,
        account: Account = None,
        python: Python = None,
        dry_run: Annotated[bool, _DRY_RUN] = False,
        detach: Annotated[bool, _DETACH] = False,
    ) -> None:
        configs, overrides = split_arguments(arguments)
        request = LaunchRequest(
            configs=configs,
            overrides=overrides,
            profile=profile,
            settings=profile_settings(time=time, partition=partition, account=account, python=python),
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            job_name=name,
            dry_run=dry_run,
            mode="local" if executor == "local" else "tunnel",
        )
        raise typer.Exit(launch(request, chain=chain, detach=detach))

    return app


def launch(request: LaunchRequest, *, chain: bool, detach: bool) -> int:
    """Shows or runs an experiment.

    Returns:
        2 for a mistake, before anything is written; 1 if a task fails; else 0.
    """
    errors: list[ValueError] = []
    problems = list(_contradictions(request, chain, detach))
    if problems:
        errors.append(ConfigError(problems, "command line"))
    if not chain:
        request = replace(request, configs=request.configs[:1])
    try:
        planned, remarks = plan(request)
        title = request.job_name or re.sub(r"[^A-Za-z0-9._-]+", "-", planned[-1][0].name)
        tasks = list(_tasks(planned, request, title))
        problems = list(_python_problems(planned[0][0], local=request.mode == "local"))
        if problems:
            errors.append(ConfigError(problems, "command line"))
    except RefusedError as error:
        errors.append(error)
    if errors:
        print(*errors, sep="\n", file=sys.stderr)
        return 2
    for remark in remarks:
        print(remark, file=sys.stderr)
    if request.dry_run:
        show(title, tasks)
        return 0
    return start(title, tasks, detach=detach)


def _contradictions(request: LaunchRequest, chain: bool, detach: bool) -> Iterator[Problem]:
    if len(request.configs) > 1 and not chain:
        value = " ".join(map(str, request.configs))
        fix = "run several, one after the other, with launchers.pipeline"
        yield Problem("CONFIG", shown(value), "one configuration", fix)
    if request.mode == "local":
        ineffective = dict(request.settings)
        ineffective.pop("runtime", None)
        if detach:
            ineffective["detach"] = "given"
        for name, value in ineffective.items():
            rule = "has an effect with --executor slurm alone"
            fix = "remove it, or add --executor slurm"
            yield Problem(f"--{name}", str(value), rule, fix)
    name = request.job_name
    if name is not None and not re.fullmatch(r"[A-Za-z0-9._-]+", name):
        rule = "letters, digits, dots, dashes and underscores, as it names directories and jobs"
        yield Problem("--name", repr(name), rule, "choose another one")


def _tasks(planned: Planned, request: LaunchRequest, title: str) -> Iterator[ExperimentTask]:
    """Yields the runs, each after the previous one."""
    stages: list[str] = []
    after: tuple[str, ...] = ()
    for job, config in planned:
        name = config.stage
        stages.append(name)
        if stages.count(name) > 1:
            name += f"-{stages.count(name)}"
        if request.mode == "local":
            text = executors.local_script(job, config, name=name, after=after)
            executor = run.LocalExecutor(env_vars=dict(job.profile.env))
        else:
            text = executors.render("task.sh.j2", job=job)
            executor = executors.slurm(job, config, title=title)
        run_dir = str(job.run_dir)
        yield ExperimentTask(name=name, script=text, executor=executor, after=after, run_dir=run_dir)
        after = (name,)


def _python_problems(job: BatchJob, *, local: bool) -> Iterator[Problem]:
    """Reports an interpreter that cannot run megarl."""
    profile = job.profile
    python = executors.local_python(job) if local else job.python
    # Other interpreters cannot be checked here: they may exist on the nodes alone, or depend on setup.
    if python != sys.executable and (not local or profile.setup):
        return
    env = {**os.environ, **profile.env}
    try:
        done = subprocess.run([python, "-c", _HAS_TORCH], env=env, capture_output=True, text=True)
        if done.returncode == 0:
            return
        why = " ".join(done.stderr.split()) or f"it ends with {done.returncode}"
    except OSError as error:
        why = f"it cannot be started ({error.strerror})"
    fix = "name that of another environment"
    visible = local or not isinstance(profile.nemo_run.tunnel, SSH)
    if visible and _ENVIRONMENT.exists():
        fix = f"give --python {_ENVIRONMENT}"
    rule = f"an interpreter that can run megarl; {why}"
    yield Problem("--python", python, rule, fix)
