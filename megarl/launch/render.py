"""A batch job and its script."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from megarl.launch.profile import Bare, Profile, Runtime

_PLAIN = re.compile(r"[\w@%+=:,./^*~\[\]-]+", re.ASCII)
_END_S = 120  # for the head to stop its driver, and for all nodes to clean up


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """A job as its script describes it; all paths are absolute.

    Args:
        command: ``train`` or ``eval``.
        config: file of the resolved configuration.
        dependent: whether the job waits for another one.
        earlier: directories of earlier runs of a chain, which it may read.
        partition: None for the cluster's default.
        gpus: number of GPUs of each node.
    """

    title: str
    name: str
    command: str
    workdir: Path
    run_dir: Path
    config: Path
    nodes: int
    partition: str | None
    gpus: int
    dependent: bool = False
    earlier: tuple[Path, ...] = ()
    profile: Profile

    @property
    def wait_s(self) -> int:
        """Seconds that srun waits for other tasks after the first has ended: the head may need all of its limit."""
        return math.ceil(self.profile.start_limit) + _END_S

    @property
    def srun(self) -> tuple[str, ...]:
        """Options of srun, without those of a container."""
        cpus = self.profile.cpus_per_task
        return (
            *("--ntasks-per-node=1", "--export=ALL", "--cpu-bind=none"),
            *("--kill-on-bad-exit=0", f"--wait={self.wait_s}"),
            *([f"--cpus-per-task={cpus}"] if cpus else []),
            *self.profile.srun,
        )

    @property
    def directory(self) -> Path:
        return self.run_dir / "slurm"

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
        return mounts(self.profile.runtime, self.workdir, (self.run_dir, *self.earlier))


def mounts(runtime: Runtime, workdir: Path, directories: Sequence[Path]) -> tuple[str, ...]:
    """Returns the mounts of a container as SOURCE:TARGET: the job's directories, and the profile's mounts."""
    own = [workdir, *(directory for directory in directories if not directory.is_relative_to(workdir))]
    further = () if isinstance(runtime, Bare) else runtime.mounts
    return (*(f"{path}:{path}" for path in own), *(mount if ":" in mount else f"{mount}:{mount}" for mount in further))


def render(job: BatchJob) -> str:
    """Returns the batch script of a job."""
    return templates().get_template("job.sbatch.j2").render(job=job, profile=job.profile, runtime=job.profile.runtime)


def directive(value: object) -> str:
    """Quotes a value for an #SBATCH line, as sbatch's own parser reads it (Slurm: src/sbatch/opt.c, _get_argument)."""
    text = str(value)
    return text if _PLAIN.fullmatch(text) else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def templates(*loaders: jinja2.BaseLoader) -> jinja2.Environment:
    """Returns the environment of the templates of `loaders`, and then of slurm/."""
    loader = jinja2.ChoiceLoader([*loaders, jinja2.PackageLoader("megarl.launch")])
    environment = jinja2.Environment(
        loader=loader,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update({"sh": lambda value: shlex.quote(str(value)), "directive": directive})
    return environment
