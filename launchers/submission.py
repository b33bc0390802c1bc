"""From what a user asks of a script to the tasks of an experiment; or everything that is wrong with it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.metadata import version
from importlib.util import find_spec

from nemo_run.config import get_nemorun_home

from launchers import executors, scripts
from launchers.experiment import Task, show, start
from megarl.config import ConfigError, Problem, RunConfig
from megarl.config.problems import shown
from megarl.launch.planning import Planned, RefusedError, plan
from megarl.launch.profile import Pyxis
from megarl.launch.render import Job
from megarl.launch.request import Request

_MOUNTED = "/nemo_run"
"""Where NeMo-Run mounts the directory of a task, and what it replaces everywhere in a job without a container."""
_WITHOUT_PYXIS = (0, 9)
"""NeMo-Run from this version on leaves the options of Pyxis out where there is no container."""


class Where(StrEnum):
    """What runs the tasks."""

    LOCAL = "local"
    SLURM = "slurm"


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What a script was asked for.

    Args:
        request: as of ``megarl launch slurm``; its job_name is the experiment's title.
        where: what runs the tasks.
        chain: there may be several configurations.
        detach: return when the jobs are submitted.
    """

    request: Request
    where: Where
    chain: bool
    detach: bool


def launch(submission: Submission) -> int:
    """Shows an experiment, or runs it.

    Returns:
        The exit code: 2 for a mistake of the user, after which nothing is written or submitted; 1 where a task has
        failed.
    """
    problems = list(_contradictions(submission))
    errors = [str(ConfigError(problems, "command line"))] if problems else []
    try:
        planned = plan(submission.request)
        title = submission.request.job_name or re.sub(r"[^A-Za-z0-9._-]+", "-", planned[-1].job.name)
        tasks = list(_tasks(planned, submission, title))
        problems = [*_unable(planned[0].job, submission.where), *_mistaken(planned[0].job, tasks, submission.where)]
        errors += [str(ConfigError(problems, "NeMo-Run"))] if problems else []
    except RefusedError as error:
        errors.append(str(error))
    if errors:
        print(*errors, sep="\n", file=sys.stderr)
        return 2
    for remark in (remark for each in planned for remark in each.remarks):
        print(remark, file=sys.stderr)
    if submission.request.dry_run:
        show(title, tasks)
        return 0
    return start(title, tasks, detach=submission.detach)


def _contradictions(submission: Submission) -> Iterator[Problem]:
    """What cannot be asked for together."""
    request = submission.request
    if len(request.configs) > 1 and not submission.chain:
        value, fix = " ".join(map(str, request.configs)), "run several, one after the other, with launchers.pipeline"
        yield Problem(field="CONFIG", value=shown(value), rule="one configuration", fix=fix)
    if submission.where is Where.LOCAL:
        alone = {"detach": submission.detach, **{name: True for name in request.settings if name != "runtime"}}
        for name in (name for name, given in alone.items() if given):
            rule, fix = "has an effect with --executor slurm alone", "remove it, or add --executor slurm"
            yield Problem(field=f"--{name.replace('_', '-')}", value="given", rule=rule, fix=fix)
    if request.job_name is not None and not re.fullmatch(r"[A-Za-z0-9._-]+", request.job_name):
        rule = "letters, digits, dots, dashes and underscores: directories and jobs are called so"
        yield Problem(field="--name", value=repr(request.job_name), rule=rule, fix="choose another one")


def _tasks(planned: Sequence[Planned], submission: Submission, title: str) -> Iterator[Task]:
    """The runs of a chain, each after the one before; or those of a sweep, so many at the same time as they may be."""
    request, here = submission.request, submission.where is Where.LOCAL
    apart = (request.parallel or (1 if here else None)) if request.sweeps else 1
    names: list[str] = []
    for index, job, config in _runs(planned):
        after = () if apart is None or len(names) < apart else (names[-apart],)
        name = f"cell-{index}" if request.sweeps else _name(config.stage, names)
        names.append(name)
        if here:
            script = scripts.local(job, config, name=name, after=() if request.sweeps else after)
            executor = executors.local(job.profile)
        else:
            script = scripts.task(job)
            executor = executors.slurm(job, config, title=title, anyway=bool(request.sweeps))
        yield Task(name=name, script=script, executor=executor, after=after, run_dir=str(job.run_dir))


def _runs(planned: Sequence[Planned]) -> Iterator[tuple[int, Job, RunConfig]]:
    """Each run that is not finished: its place in the sweep, a job of its own, its configuration."""
    for job, configs in ((each.job, each.configs) for each in planned):
        directories = [job.run_dir / cell for cell in job.cells] or [job.run_dir]
        for index, directory in enumerate(directories):
            if index not in job.finished:
                own = replace(job, run_dir=directory, configs=(job.configs[index],), cells=(), finished=frozenset())
                yield index, own, configs[index]


def _name(stage: str, names: Sequence[str]) -> str:
    """Of a task: its stage, numbered from the second one of a kind on."""
    before = sum(name.partition("-")[0] == stage for name in names)
    return f"{stage}-{before + 1}" if before else stage


def _unable(job: Job, where: Where) -> Iterator[Problem]:
    """What the installed NeMo-Run, and this interpreter, cannot do."""
    runtime, installed = job.profile.runtime, version("nemo-run")
    slurm = where is Where.SLURM
    if slurm and not isinstance(runtime, Pyxis) and tuple(map(int, installed.split(".")[:2])) < _WITHOUT_PYXIS:
        rule = f"pyxis: NeMo-Run {installed} always gives srun options of Pyxis"
        fix = "use the newest NeMo-Run, in an environment of its own (make nemo-run), or megarl launch slurm"
        yield Problem(field="runtime", value=runtime.name, rule=rule, fix=fix)
    if (scripts.interpreter(job) if not slurm else job.python) == sys.executable and find_spec("torch") is None:
        rule = "an interpreter that can run megarl; this one, which launches it, has no torch"
        yield Problem(field="--python", value=sys.executable, rule=rule, fix="name that of another environment")


def _mistaken(job: Job, tasks: Sequence[Task], where: Where) -> Iterator[Problem]:
    """What NeMo-Run would make something else of, without a word."""
    if where is Where.LOCAL:
        return
    home = get_nemorun_home()
    if re.search(r"[\s,]", home):
        rule, fix = "without spaces and commas, which NeMo-Run does not quote", "choose another directory"
        yield Problem(field="NEMORUN_HOME", value=repr(home), rule=rule, fix=fix)
    if isinstance(job.profile.runtime, Pyxis):
        return
    for name, text in {"NEMORUN_HOME": home, **{task.name: f"{task.script}{task.executor}" for task in tasks}}.items():
        found = re.search(rf"\S*{_MOUNTED}\S*", text)
        if found:
            rule = f"nowhere {_MOUNTED}: NeMo-Run puts the directory of the task in its place"
            yield Problem(field=name, value=found.group(), rule=rule, fix="choose other names of directories")
