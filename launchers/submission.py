"""From a script's command line to the tasks of an experiment, or to every problem of the request."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import nemo_run as run
import typer
from nemo_run.config import get_nemorun_home

from launchers import executors
from launchers.experiment import ExperimentTask, show, start
from megarl.config import ConfigError, Problem
from megarl.config.problems import shown
from megarl.launch.checker import write_error
from megarl.launch.cli import Account, GPUsPerNode, Nodes, Partition, ProfileOption, Python, Time
from megarl.launch.planning import PlannedJob, RefusedError, plan
from megarl.launch.profile import SSH, Profile, Pyxis
from megarl.launch.render import BatchJob
from megarl.launch.request import LaunchMode, LaunchRequest, split_arguments

_MOUNTED = "/nemo_run"  # NeMo-Run replaces it by the directory of a task, everywhere in a job without a container
_ENVIRONMENT = Path(".venv/bin/python")  # the interpreter of make setup
_HAS_TORCH = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None and 'it has no torch')"

_EXECUTOR = "Where the tasks run: on this machine, or on the profile's cluster."


@dataclass(frozen=True, kw_only=True)
class ScriptOptions:
    """The options of every script."""

    executor: Annotated[Literal["local", "slurm"], typer.Option(help=_EXECUTOR)] = "local"
    profile: ProfileOption = None
    name: Annotated[str | None, typer.Option(help="Name of the experiment; default: that of the last run.dir.")] = None
    nodes: Nodes = None
    gpus_per_node: GPUsPerNode = None
    time: Time = None
    partition: Partition = None
    account: Account = None
    python: Python = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the scripts; write and submit nothing.")] = False
    detach: Annotated[bool, typer.Option("--detach", help="Return once the jobs are submitted.")] = False


def script(*, chain: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a function that declares a script's own parameters the script's command, with `ScriptOptions` added."""

    def decorate(own: Callable[..., None]) -> Callable[..., None]:
        def main(**given: Any) -> None:
            options = ScriptOptions(**{field.name: given.pop(field.name) for field in fields(ScriptOptions)})
            raise typer.Exit(launch(_request(options, **given), chain=chain, detach=options.detach))

        declared = (inspect.signature(part, eval_str=True).parameters.values() for part in (own, ScriptOptions))
        parameters = [parameter for part in declared for parameter in part]
        main.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
        main.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        main.__doc__ = own.__doc__
        return main

    return decorate


def run_script(main: Callable[..., None]) -> None:
    """Runs a script's command."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()


def _request(options: ScriptOptions, arguments: Sequence[str]) -> LaunchRequest:
    configs, overrides = split_arguments(arguments)
    runtime = options.python and {"python": options.python}
    settings = {"time": options.time, "partition": options.partition, "account": options.account, "runtime": runtime}
    return LaunchRequest(
        configs=configs,
        overrides=overrides,
        profile=options.profile,
        settings={name: value for name, value in settings.items() if value is not None},
        nodes=options.nodes,
        gpus_per_node=options.gpus_per_node,
        job_name=options.name,
        dry_run=options.dry_run,
        mode=LaunchMode.LOCAL if options.executor == "local" else LaunchMode.TUNNEL,
    )


def launch(request: LaunchRequest, *, chain: bool, detach: bool) -> int:
    """Shows or runs an experiment; returns 2 for a mistake, before anything is written, and 1 if a task fails."""
    problems = list(_contradictions(request, chain, detach))
    local = request.mode is LaunchMode.LOCAL
    errors = [str(ConfigError(problems, "command line"))] if problems else []
    try:
        planned = plan(request if chain else replace(request, configs=request.configs[:1]))
        title = request.job_name or re.sub(r"[^A-Za-z0-9._-]+", "-", planned[-1].job.name)
        tasks = list(_tasks(planned, request, title))
        problems = list(_nemo_run_problems(planned[0].job, tasks, local=local))
        errors += [str(ConfigError(problems, "NeMo-Run"))] if problems else []
    except RefusedError as error:
        errors.append(str(error))
    if errors:
        print(*errors, sep="\n", file=sys.stderr)
        return 2
    for remark in (remark for each in planned for remark in each.remarks):
        print(remark, file=sys.stderr)
    if request.dry_run:
        show(title, tasks)
        return 0
    return start(title, tasks, detach=detach)


def _contradictions(request: LaunchRequest, chain: bool, detach: bool) -> Iterator[Problem]:
    if len(request.configs) > 1 and not chain:
        value = " ".join(map(str, request.configs))
        fix = "run several, one after the other, with launchers.pipeline"
        yield Problem(field="CONFIG", value=shown(value), rule="one configuration", fix=fix)
    if request.mode is LaunchMode.LOCAL:
        alone = {name: str(value) for name, value in request.settings.items() if name != "runtime"}
        for name, value in {**alone, **({"detach": "given"} if detach else {})}.items():
            rule = "has an effect with --executor slurm alone"
            fix = "remove it, or add --executor slurm"
            yield Problem(field=f"--{name}", value=value, rule=rule, fix=fix)
    if request.job_name is not None and not re.fullmatch(r"[A-Za-z0-9._-]+", request.job_name):
        rule = "letters, digits, dots, dashes and underscores, as it names directories and jobs"
        yield Problem(field="--name", value=repr(request.job_name), rule=rule, fix="choose another one")


def _tasks(planned: Sequence[PlannedJob], request: LaunchRequest, title: str) -> Iterator[ExperimentTask]:
    """Yields the runs, each after the previous one."""
    stages: list[str] = []
    after: tuple[str, ...] = ()
    for each in planned:
        job = each.job
        config = each.config
        stages.append(config.stage)
        count = stages.count(config.stage)
        name = config.stage if count == 1 else f"{config.stage}-{count}"
        if request.mode is LaunchMode.LOCAL:
            text = executors.local_script(job, config, name=name, after=after)
            executor = run.LocalExecutor(env_vars=dict(job.profile.env))
        else:
            text = executors.render("task.sh.j2", job=job)
            executor = executors.slurm(job, config, title=title)
        yield ExperimentTask(name=name, script=text, executor=executor, after=after, run_dir=str(job.run_dir))
        after = (name,)


def _nemo_run_problems(job: BatchJob, tasks: Sequence[ExperimentTask], *, local: bool) -> Iterator[Problem]:
    """Finds what NeMo-Run, or the interpreter of the runs, cannot do."""
    home = get_nemorun_home()
    profile = job.profile
    if error := write_error(Path(home)):
        rule = f"can be written ({error.strerror})"
        fix = "set it to a directory that you can write"
        yield Problem(field="NEMORUN_HOME", value=home, rule=rule, fix=fix)
    python = executors.local_python(job) if local else job.python
    # Other interpreters cannot be checked here: they may exist on the nodes alone, or depend on setup.
    if (python == sys.executable or (local and not profile.setup)) and (why := _broken(python, profile.env)):
        visible = (local or not isinstance(profile.nemo_run.tunnel, SSH)) and _ENVIRONMENT.exists()
        fix = f"give --python {_ENVIRONMENT}" if visible else "name that of another environment"
        yield Problem(field="--python", value=python, rule=f"an interpreter that can run megarl; {why}", fix=fix)
    if not local:
        yield from _cluster_problems(home, profile, tasks)


def _broken(python: str, env: Mapping[str, str]) -> str:
    """Returns why an interpreter cannot run megarl, or an empty text."""
    command = [python, "-c", _HAS_TORCH]
    try:
        done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"it cannot be started ({error.strerror})"
    return " ".join(done.stderr.split()) or f"it ends with {done.returncode}" if done.returncode else ""


def _cluster_problems(home: str, profile: Profile, tasks: Sequence[ExperimentTask]) -> Iterator[Problem]:
    """Finds paths that NeMo-Run does not quote, or replaces, in the scripts of a cluster's jobs."""
    if re.search(r"[\s,]", home):
        rule = "without spaces and commas, which NeMo-Run does not quote"
        fix = "choose another directory"
        yield Problem(field="NEMORUN_HOME", value=repr(home), rule=rule, fix=fix)
    texts = {"NEMORUN_HOME": home, **{task.name: f"{task.script}{task.executor}" for task in tasks}}
    for name, text in () if isinstance(profile.runtime, Pyxis) else texts.items():
        if found := re.search(rf"\S*{_MOUNTED}\S*", text):
            rule = f"nowhere {_MOUNTED}: NeMo-Run puts the directory of the task in its place"
            yield Problem(field=name, value=found.group(), rule=rule, fix="choose other names of directories")
