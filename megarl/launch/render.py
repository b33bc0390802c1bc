"""A batch job and its script."""

from __future__ import annotations

import math
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import jinja2

from megarl.launch.profile import Bare, Profile
from megarl.run.paths import JOBS

_PLAIN = re.compile(r"[\w@%+=:,./^*~\[\]-]+", re.ASCII)
_END_S = 120  # for the head to stop its driver, and for all nodes to clean up


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """A job as its script describes it; all paths are absolute.

    Args:
        command: ``train`` or ``eval``.
        config: file of the resolved configuration.
        dependent: whether the job waits for another one.
        earlier: directories of a chain's earlier runs, which the job may read.
        gpus: number of GPUs of each node.
    """

    title: str
    name: str
    command: str
    workdir: Path
    run_dir: Path
    config: Path
    nodes: int
    gpus: int
    dependent: bool = False
    earlier: tuple[Path, ...] = ()
    profile: Profile

    @property
    def srun(self) -> tuple[str, ...]:
        """Options of srun, without those of a container."""
        # srun waits so long for other tasks after the first has ended: the head may need all of its limit.
        wait_s = math.ceil(self.profile.start_limit) + _END_S
        options = ["--ntasks-per-node=1", "--export=ALL", "--cpu-bind=none"]
        options += ["--kill-on-bad-exit=0", f"--wait={wait_s}"]
        if self.profile.cpus_per_task is not None:
            options.append(f"--cpus-per-task={self.profile.cpus_per_task}")
        return (*options, *self.profile.srun)

    @property
    def gpu_options(self) -> list[str]:
        """Options of sbatch that request the GPUs."""
        request = self.profile.gpu_request
        if request == "none" or not self.gpus:
            return []
        gpus = f"{self.profile.gpu_type or ''}:{self.gpus}".removeprefix(":")
        if request == "gres":
            gpus = f"gpu:{gpus}"
        return [f"--{request}={gpus}"]

    @property
    def directory(self) -> Path:
        return self.run_dir / JOBS

    @property
    def script(self) -> Path:
        return self.directory / "job.sbatch"

    @property
    def output(self) -> str:
        return f"{self.directory}/".replace("%", "%%") + "%j.out"

    @property
    def python(self) -> str:
        return self.profile.runtime.python or sys.executable

    @property
    def mounts(self) -> tuple[str, ...]:
        """Mounts of a container as SOURCE:TARGET: the job's directories and the profile's."""
        paths = [str(self.workdir)]
        for directory in (self.run_dir, *self.earlier):
            if not directory.is_relative_to(self.workdir):
                paths.append(str(directory))
        runtime = self.profile.runtime
        if not isinstance(runtime, Bare):
            paths += runtime.mounts
        return tuple(path if ":" in path else f"{path}:{path}" for path in paths)


def render(job: BatchJob) -> str:
    """Returns the batch script of a job."""
    template = templates().get_template("job.sbatch.j2")
    return template.render(job=job, profile=job.profile, runtime=job.profile.runtime)


def directive(value: object) -> str:
    """Quotes a value for an #SBATCH line, as sbatch reads it (Slurm: src/sbatch/opt.c, _get_argument)."""
    text = str(value)
    if _PLAIN.fullmatch(text):
        return text
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{quoted}"'


def templates(*loaders: jinja2.BaseLoader) -> jinja2.Environment:
    """Returns the environment of the templates of `loaders`, and then of slurm/."""
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([*loaders, jinja2.PackageLoader("megarl.launch")]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["sh"] = lambda value: shlex.quote(str(value))
    environment.filters["directive"] = directive
    return environment
