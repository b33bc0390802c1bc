"""Batch scripts: what a job is, and its script from the template."""

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
_ENDING_S = 120
"""For the head to end its driver, and for all nodes to clean up."""


@dataclass(frozen=True, kw_only=True)
class Component:
    """Nodes of one kind.

    Args:
        nodes: how many.
        partition: of these nodes; None is the cluster's usual one.
        gpus: of each; 0 asks for none.
    """

    nodes: int
    partition: str | None
    gpus: int


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job, as its script has it. All paths are absolute.

    Args:
        title: what runs, for people.
        name: as Slurm shows it.
        command: ``train`` or ``eval``.
        present: directory in which the job works.
        run_dir: of the run, or above those of a sweep.
        configs: files of the resolved configurations: that of the run, or those of the cells of a sweep.
        cells: directories of the runs of a sweep, below run_dir; none for a single run.
        finished: places in cells of those that have nothing left to do and get no task.
        parallel: runs of a sweep at the same time; None sets no limit.
        components: one, or two of a heterogeneous job.
        dependent: the job waits for another one.
        earlier: directories of the runs that it follows, which it may read.
        profile: of the cluster.
    """

    title: str
    name: str
    command: str
    present: Path
    run_dir: Path
    configs: tuple[Path, ...]
    cells: tuple[str, ...] = ()
    finished: frozenset[int] = frozenset()
    parallel: int | None = None
    components: tuple[Component, ...]
    dependent: bool = False
    earlier: tuple[Path, ...] = ()
    profile: Profile

    @property
    def patience(self) -> int:
        """Seconds for srun to wait for the other tasks once one has ended.

        A task may end before the head can know of it, which names the node when its limit is over, and then cleans up.
        """
        return math.ceil(self.profile.start_limit) + _ENDING_S

    @property
    def srun(self) -> tuple[str, ...]:
        """Options of srun, but for those of a container: one task on each node, and its own end for each."""
        cpus, several = self.profile.cpus_per_task, len(self.components) > 1
        return (
            *("--ntasks-per-node=1", "--export=ALL", "--cpu-bind=none"),
            *("--kill-on-bad-exit=0", f"--wait={self.patience}"),
            *(["--het-group=0,1"] if several else []),
            *([f"--cpus-per-task={cpus}"] if cpus else []),
            *self.profile.srun,
        )

    @property
    def directory(self) -> Path:
        """Where the job's own files are: script, configuration, output, logs."""
        return self.run_dir / "slurm"

    @property
    def script(self) -> Path:
        """The batch script."""
        return self.directory / "job.sbatch"

    @property
    def config(self) -> Path:
        """The resolved configuration of a single run."""
        (config,) = self.configs
        return config

    @property
    def output(self) -> str:
        """The job's output, as sbatch takes it."""
        return f"{self.directory}/".replace("%", "%%") + ("%A_%a.out" if self.cells else "%j.out")

    @property
    def nodes(self) -> int:
        """Of all components."""
        return sum(component.nodes for component in self.components)

    @property
    def array(self) -> str:
        """The indices of a sweep, as sbatch takes them: ranges of those that are not finished."""
        left = [index for index in range(len(self.cells)) if index not in self.finished]
        starts = [index for index in left if index - 1 not in left]
        ends = [index for index in left if index + 1 not in left]
        ranges = (str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True))
        return ",".join(ranges) + ("" if self.parallel is None else f"%{self.parallel}")

    @property
    def python(self) -> str:
        """The interpreter that has megarl."""
        return self.profile.runtime.python or sys.executable

    @property
    def mounts(self) -> tuple[str, ...]:
        """What a container sees; see ``mounts``."""
        return mounts(self.profile.runtime, self.present, (self.run_dir, *self.earlier))


def mounts(runtime: Runtime, present: Path, directories: Sequence[Path]) -> tuple[str, ...]:
    """What a container sees, each as SOURCE:TARGET: directories of the job under their own names, and the profile's.

    Args:
        runtime: of the profile.
        present: directory in which the job works.
        directories: of runs, absolute.
    """
    own = [present, *(directory for directory in directories if not directory.is_relative_to(present))]
    further = () if isinstance(runtime, Bare) else runtime.mounts
    return (*(f"{path}:{path}" for path in own), *(mount if ":" in mount else f"{mount}:{mount}" for mount in further))


def render(job: Job) -> str:
    """The batch script of a job."""
    return templates().get_template("job.sbatch.j2").render(job=job, profile=job.profile, runtime=job.profile.runtime)


def directive(value: object) -> str:
    """A value for an #SBATCH line: sbatch reads quotes and backslashes there as its own parser has it, not the shell's.

    Between double quotes a backslash keeps the next character, whatever it is (Slurm: src/sbatch/opt.c, _get_argument).
    """
    text = str(value)
    return text if _PLAIN.fullmatch(text) else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def templates(*loaders: jinja2.BaseLoader) -> jinja2.Environment:
    """The templates of a batch script, after those of further loaders."""
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([*loaders, jinja2.PackageLoader("megarl.launch")]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters.update({"sh": lambda value: shlex.quote(str(value)), "directive": directive})
    return environment
