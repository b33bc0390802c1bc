"""From a script's command line to the tasks of an experiment, or to everything that is wrong with it."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any

import nemo_run as run
import typer
from nemo_run.config import get_nemorun_home

from launchers import executors
from launchers.experiment import ExperimentTask, show, start
from megarl.config import ConfigError, Problem, RunConfig
from megarl.config.problems import shown
from megarl.launch.planning import PlannedJob, RefusedError, plan
from megarl.launch.profile import SSH, Profile, Pyxis
from megarl.launch.render import BatchJob
from megarl.launch.request import LaunchMode, LaunchRequest, split_arguments

_PROFILE = "The cluster's profile, in place of ~/.config/megarl/cluster.yaml. Options given here go before it."
_MOUNTED = "/nemo_run"  # what NeMo-Run replaces by the directory of a task, everywhere in a job without a container
_WITHOUT_PYXIS = (0, 9)  # from this version on NeMo-Run gives no options of Pyxis where there is no container
_ENVIRONMENT = Path(".venv/bin/python")  # the interpreter of make setup
_HAS_TORCH = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None and 'it has no torch')"


class ExecutorName(StrEnum):
    LOCAL = "local"
    SLURM = "slurm"


def _shared(
    executor: Annotated[
        ExecutorName, typer.Option(help="What runs the tasks: this machine, or the cluster of the profile.")
    ] = ExecutorName.LOCAL,
    profile: Annotated[Path | None, typer.Option(metavar="FILE", help=_PROFILE)] = None,
    name: Annotated[str | None, typer.Option(help="Of the experiment; that of the last run.dir.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes, as cluster.nodes=N.")] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="GPUs of each, as cluster.devices_per_node=N.")
    ] = None,
    time: Annotated[str | None, typer.Option(help="Time limit of each job, as 04:00:00.")] = None,
    partition: Annotated[str | None, typer.Option(help="Partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Account that is charged.")] = None,
    python: Annotated[str | None, typer.Option(help="Interpreter that has megarl, where the runs are.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the scripts; write and submit nothing.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Return when the jobs are submitted.")] = False,
) -> None:
    """The options of every script."""


def script(*, chain: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a script's command of a function that has its own parameters; the shared options are added."""

    def decorate(own: Callable[..., None]) -> Callable[..., None]:
        def main(**given: Any) -> None:
            raise typer.Exit(launch(_request(given), chain=chain, detach=given["detach"]))

        parts = (inspect.signature(function, eval_str=True).parameters.values() for function in (own, _shared))
        parameters = [parameter for part in parts for parameter in part]
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


def _request(given: Mapping[str, Any]) -> LaunchRequest:
    configs, overrides = split_arguments(given["arguments"])
    python = given["python"]
    settings = {name: given[name] for name in ("time", "partition", "account")}
    settings["runtime"] = python and {"python": python}
    return LaunchRequest(
        configs=configs,
        overrides=overrides,
        settings={name: value for name, value in settings.items() if value is not None},
        job_name=given["name"],
        sweeps=tuple(given.get("sweeps", ())),
        parallel=given.get("parallel"),
        mode=LaunchMode.LOCAL if given["executor"] is ExecutorName.LOCAL else LaunchMode.TUNNEL,
        **{name: given[name] for name in ("profile", "nodes", "gpus_per_node", "dry_run")},
    )


def launch(request: LaunchRequest, *, chain: bool, detach: bool) -> int:
    """Shows an experiment, or runs it; returns 2 for a mistake, before anything is written, 1 where a task failed."""
    problems, local = list(_contradictions(request, chain, detach)), request.mode is LaunchMode.LOCAL
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
        value, fix = " ".join(map(str, request.configs)), "run several, one after the other, with launchers.pipeline"
        yield Problem(field="CONFIG", value=shown(value), rule="one configuration", fix=fix)
    if request.mode is LaunchMode.LOCAL:
        alone = {name: str(value) for name, value in request.settings.items() if name != "runtime"}
        for name, value in {**alone, **({"detach": "given"} if detach else {})}.items():
            rule, fix = "has an effect with --executor slurm alone", "remove it, or add --executor slurm"
            yield Problem(field=f"--{name}", value=value, rule=rule, fix=fix)
    if request.job_name is not None and not re.fullmatch(r"[A-Za-z0-9._-]+", request.job_name):
        rule = "letters, digits, dots, dashes and underscores: directories and jobs are called so"
        yield Problem(field="--name", value=repr(request.job_name), rule=rule, fix="choose another one")


def _tasks(planned: Sequence[PlannedJob], request: LaunchRequest, title: str) -> Iterator[ExperimentTask]:
    """The runs of a chain, each after the one before, or those of a sweep, `parallel` of them at the same time."""
    sweep, local = bool(request.sweeps), request.mode is LaunchMode.LOCAL
    parallel = (request.parallel or (1 if local else None)) if sweep else 1
    names: list[str] = []
    for index, job, config in _runs(planned):
        after = () if parallel is None or len(names) < parallel else (names[-parallel],)
        before = sum(name.partition("-")[0] == config.stage for name in names)
        stage = f"{config.stage}-{before + 1}" if before else config.stage
        name = f"cell-{index}" if sweep else stage
        names.append(name)
        if local:
            text = executors.local_script(job, config, name=name, after=() if sweep else after)
            executor = run.LocalExecutor(env_vars=dict(job.profile.env))
        else:
            text = executors.render("task.sh.j2", job=job)
            executor = executors.slurm(job, config, title=title, anyway=sweep)
        yield ExperimentTask(name=name, script=text, executor=executor, after=after, run_dir=str(job.run_dir))


def _runs(planned: Sequence[PlannedJob]) -> Iterator[tuple[int, BatchJob, RunConfig]]:
    """Each unfinished run: its index in the sweep, a job of its own, its configuration."""
    for job, configs in ((each.job, each.configs) for each in planned):
        directories = [job.run_dir / cell for cell in job.cells] or [job.run_dir]
        for index, directory in enumerate(directories):
            if index not in job.finished:
                own = replace(job, run_dir=directory, configs=(job.configs[index],), cells=(), finished=frozenset())
                yield index, own, configs[index]


def _nemo_run_problems(job: BatchJob, tasks: Sequence[ExperimentTask], *, local: bool) -> Iterator[Problem]:
    """What keeps the installed NeMo-Run, or the runs, from working as asked."""
    home, profile = get_nemorun_home(), job.profile
    existing = next(path for path in (Path(home), *Path(home).parents) if os.path.exists(path))
    try:
        TemporaryFile(dir=existing).close()
    except OSError as error:
        rule, fix = f"can be written ({error.strerror})", "set it to a directory that you can write"
        yield Problem(field="NEMORUN_HOME", value=home, rule=rule, fix=fix)
    python = executors.local_python(job) if local else job.python
    # On the nodes another interpreter may be there, or setup may change what it finds.
    if (python == sys.executable or (local and not profile.setup)) and (why := _broken(python, profile.env)):
        visible = (local or not isinstance(profile.nemo_run.tunnel, SSH)) and _ENVIRONMENT.exists()
        fix = f"give --python {_ENVIRONMENT}" if visible else "name that of another environment"
        yield Problem(field="--python", value=python, rule=f"an interpreter that can run megarl; {why}", fix=fix)
    if not local:
        yield from _cluster_problems(home, profile, tasks)


def _broken(python: str, env: Mapping[str, str]) -> str:
    """Why an interpreter cannot run megarl; empty where it can."""
    command = [python, "-c", _HAS_TORCH]
    try:
        done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"it cannot be started ({error.strerror})"
    return " ".join(done.stderr.split()) or f"it ends with {done.returncode}" if done.returncode else ""


def _cluster_problems(home: str, profile: Profile, tasks: Sequence[ExperimentTask]) -> Iterator[Problem]:
    """What the installed NeMo-Run cannot do on a cluster, or would silently do otherwise."""
    runtime, installed = profile.runtime, version("nemo-run")
    pyxis = isinstance(runtime, Pyxis)
    if not pyxis and tuple(map(int, installed.split(".")[:2])) < _WITHOUT_PYXIS:
        rule = f"pyxis: NeMo-Run {installed} always gives srun options of Pyxis"
        fix = "use the newest NeMo-Run, in an environment of its own (make nemo-run), or megarl launch slurm"
        yield Problem(field="runtime", value=runtime.name, rule=rule, fix=fix)
    if re.search(r"[\s,]", home):
        rule, fix = "without spaces and commas, which NeMo-Run does not quote", "choose another directory"
        yield Problem(field="NEMORUN_HOME", value=repr(home), rule=rule, fix=fix)
    texts = {"NEMORUN_HOME": home, **{task.name: f"{task.script}{task.executor}" for task in tasks}}
    for name, text in () if pyxis else texts.items():
        if found := re.search(rf"\S*{_MOUNTED}\S*", text):
            rule = f"nowhere {_MOUNTED}: NeMo-Run puts the directory of the task in its place"
            yield Problem(field=name, value=found.group(), rule=rule, fix="choose other names of directories")
