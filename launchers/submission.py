"""From what a user asks of a script to the tasks of an experiment; or everything that is wrong with it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from launchers import checks, executors, scripts
from launchers.experiment import Task, show, start
from megarl.config import ConfigError, Problem, RunConfig
from megarl.config.problems import shown
from megarl.launch.planning import Planned, RefusedError, plan
from megarl.launch.render import Job
from megarl.launch.request import Request


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
    request, here = submission.request, submission.where is Where.LOCAL
    problems = list(_contradictions(submission))
    errors = [str(ConfigError(problems, "command line"))] if problems else []
    try:
        planned = plan(request if submission.chain else replace(request, configs=request.configs[:1]))
        title = request.job_name or re.sub(r"[^A-Za-z0-9._-]+", "-", planned[-1].job.name)
        tasks = list(_tasks(planned, submission, title))
        problems = list(checks.problems(planned[0].job, tasks, here=here))
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
    return start(title, tasks, detach=submission.detach)


def _contradictions(submission: Submission) -> Iterator[Problem]:
    """What cannot be asked for together."""
    request = submission.request
    if len(request.configs) > 1 and not submission.chain:
        value, fix = " ".join(map(str, request.configs)), "run several, one after the other, with launchers.pipeline"
        yield Problem(field="CONFIG", value=shown(value), rule="one configuration", fix=fix)
    if submission.where is Where.LOCAL:
        alone = {name: str(value) for name, value in request.settings.items() if name != "runtime"}
        for name, value in {**alone, **({"detach": "given"} if submission.detach else {})}.items():
            rule, fix = "has an effect with --executor slurm alone", "remove it, or add --executor slurm"
            yield Problem(field=f"--{name}", value=value, rule=rule, fix=fix)
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
