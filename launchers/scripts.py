"""The shell scripts of an experiment's tasks: what runs on a cluster's nodes, what prepares that, what runs here."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import jinja2

from megarl.config import RunConfig, as_yaml
from megarl.launch.profile import Bare
from megarl.launch.render import Job, templates

_END = "END OF THE CONFIGURATION"


def setup(job: Job, config: RunConfig) -> str:
    """What the batch script does before its task; it makes the job's secret and never shows it."""
    return _rendered("setup.sh.j2", job=job, config=as_yaml(config), end=_END)


def task(job: Job) -> str:
    """What srun starts once on each node."""
    return _rendered("task.sh.j2", job=job)


def local(job: Job, config: RunConfig, *, name: str, after: Sequence[str]) -> str:
    """A run on this machine, as a task that starts where those before it have succeeded.

    Args:
        job: of the run.
        config: of the run.
        name: of the task.
        after: names of the tasks before it.
    """
    values = {"config": as_yaml(config), "name": name, "after": after, "end": _END, "python": interpreter(job)}
    return _rendered("local.sh.j2", job=job, **values)


def interpreter(job: Job) -> str:
    """That of runs on this machine, where the profile's containers are not used."""
    return job.python if isinstance(job.profile.runtime, Bare) else sys.executable


def _rendered(template: str, /, *, job: Job, **values: object) -> str:
    own = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    known = {"job": job, "profile": job.profile, "runtime": job.profile.runtime, "umask": _umask()}
    return templates(own).get_template(template).render(**known, **values)


def _umask() -> str:
    """What this process's files do not allow, as umask takes it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return f"{mask:04o}"
