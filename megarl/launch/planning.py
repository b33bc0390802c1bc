"""From a request to jobs that can be submitted; or everything that is wrong with it, at once."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from megarl.config import ConfigError, EvalConfig, Problem, RunConfig
from megarl.launch.chain import Link, load_link
from megarl.launch.checks import Examination, profile_problems
from megarl.launch.node.configuration import JOINED, other_ray
from megarl.launch.profile import Profile, found_profile, load_profile
from megarl.launch.render import Component, Job
from megarl.launch.request import Request, Way, as_given, submitted_as
from megarl.launch.sweep import Cell, load_cells, read_sweeps, run_directory

T = TypeVar("T")


class RefusedError(ValueError):
    """A request that cannot be submitted; its text has every problem, by what they were found in."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        super().__init__("\n".join(map(str, errors)))


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A job and the runs that it is for.

    Args:
        job: for its script.
        configs: of its runs: one, or the cells of a sweep.
        finished: of these cells, which have nothing left to do.
    """

    job: Job
    configs: tuple[RunConfig, ...]
    finished: tuple[Cell, ...] = ()

    @property
    def remarks(self) -> list[str]:
        """Lines that tell which cells the job leaves out."""
        return [f"{cell} is finished: left out" for cell in self.finished]


def plan(request: Request) -> list[Planned]:
    """The jobs of a request; each but the first waits for the one before.

    Raises:
        RefusedError: anything is wrong.
    """
    errors: list[ConfigError] = []
    profile = _kept(errors, partial(_profile, request))
    examine = Examination(request, profile or Profile())
    cells, wrong = read_sweeps(request.sweeps)
    wrong = [*request.contradictions(), *_no_sbatch(request, examine), *wrong]
    if wrong:
        errors.append(ConfigError(wrong, "command line"))
    planned: list[Planned] = []
    if not request.sweeps:
        planned = _chain(request, examine, errors)
    elif cells:
        for path in request.configs:
            planned += _sweep(path, cells, request, examine, errors)
    if errors:
        raise RefusedError(errors)
    return planned


def _kept(errors: list[ConfigError], make: Callable[[], T]) -> T | None:
    """What is made; None, with the error kept, where that is refused."""
    try:
        return make()
    except ConfigError as error:
        errors.append(error)
        return None


def _profile(request: Request) -> Profile:
    """The cluster's profile with the command line on top of it."""
    try:
        profile = load_profile(request.profile, request.settings)
        problems = list(profile_problems(profile))
        if problems:
            raise ConfigError(problems)
        return profile
    except ConfigError as error:
        problems = [as_given(problem, request.settings) for problem in error.problems]
    of_file = any(not problem.field.startswith("--") for problem in problems)
    raise ConfigError(problems, str(found_profile(request.profile) or "command line") if of_file else "command line")


def _no_sbatch(request: Request, examine: Examination) -> Iterator[Problem]:
    submits = not (request.dry_run or request.way is Way.NONE or examine.elsewhere)
    if submits and shutil.which("sbatch") is None:
        fix = "submit from a login node of the cluster, or write and show the script with --dry-run"
        yield Problem(field="sbatch", value="not found", rule="Slurm's commands are on the PATH", fix=fix)


def _chain(request: Request, examine: Examination, errors: list[ConfigError]) -> list[Planned]:
    """A job for each configuration."""
    links: list[Link] = []
    planned: list[Planned] = []
    refused: list[Path] = []
    owners: dict[Path | None, Path] = {}
    for path in request.configs:
        overrides = _kept(errors, partial(_overrides, path, request))
        if overrides is None:
            continue
        named = run_directory(path, overrides)
        run_dir = None if named is None else Path(named).absolute()
        if run_dir in owners:
            rule = f"a directory of its own; {owners[run_dir]} has this one too"
            problem = Problem(field="run.dir", value=str(run_dir), rule=rule, fix="set it in the files, not for all")
            errors.append(ConfigError([problem], str(path)))
        owners |= {} if run_dir is None else {run_dir: path}
        link = _kept(errors, partial(load_link, path, overrides, links, examine, refused))
        if link is None:
            refused += [] if run_dir is None else [run_dir]
        else:
            earlier = tuple(examine.present / before.config.run.dir for before in links)
            job = _job([link.config], link.config.run.dir, request, examine, earlier=earlier)
            links.append(link)
            planned.append(Planned(job=job, configs=(link.config,)))
    return planned


def _sweep(
    path: Path, cells: Sequence[Cell], request: Request, examine: Examination, errors: list[ConfigError]
) -> list[Planned]:
    """One job for the cells of a configuration that are not finished; none where anything is wrong with one."""
    overrides = _kept(errors, partial(_overrides, path, request))
    if overrides is None:
        return []
    base = run_directory(path, overrides) or ""  # what is missing, the check of each cell tells
    configs, wrong = load_cells(path, overrides, base, cells, examine)
    errors += wrong
    if wrong:
        return []
    finished = tuple(cell for cell, config in zip(cells, configs, strict=True) if examine.finished(config))
    if len(finished) == len(cells):
        rule = f"a sweep with something left to do; all of its runs, {len(cells)}, are finished"
        fix = "choose another run.dir, or raise run.steps to go on with them"
        errors.append(ConfigError([Problem(field="run.dir", value=base, rule=rule, fix=fix)], str(path)))
        return []
    job = _job(configs, base, request, examine, cells=cells, finished=finished)
    return [Planned(job=job, configs=tuple(configs), finished=finished)]


def _overrides(path: Path, request: Request) -> list[str]:
    """What the job sets in a configuration.

    Raises:
        ConfigError: the file cannot be read, or the configuration joins a Ray of its own.
    """
    sizes = {"nodes": request.nodes, "devices_per_node": request.gpus_per_node}
    given = [f"cluster.{name}={value}" for name, value in sizes.items() if value is not None]
    problems = list(other_ray(path, request.overrides))
    if request.way is Way.NONE:
        return [*request.overrides, *given]
    if problems:
        raise ConfigError(problems, str(path))
    return [*request.overrides, *given, JOINED]


def _job(
    configs: Sequence[RunConfig],
    run_dir: str,
    request: Request,
    examine: Examination,
    *,
    cells: Sequence[Cell] = (),
    finished: Sequence[Cell] = (),
    earlier: tuple[Path, ...] = (),
) -> Job:
    """What the script of a run, or of a sweep, has to say."""
    config, count = configs[0], len(cells) - len(finished)
    runs = f"{count} run{'s' * (count > 1)} of {config.stage} below {run_dir}"
    of = runs if cells else f"{config.stage} in {run_dir}"
    return Job(
        title=" ".join(of.split()),
        name=request.job_name or (examine.present / run_dir).name,
        command="eval" if isinstance(config, EvalConfig) else "train",
        present=examine.present,
        run_dir=examine.present / run_dir,
        configs=tuple(examine.present / submitted_as(config, "slurm") for config in configs),
        cells=tuple(cell.name for cell in cells),
        finished=frozenset(cell.index for cell in finished),
        parallel=request.parallel,
        components=tuple(_components(config, request, examine.profile)),
        dependent=bool(earlier) or request.dependency is not None,
        earlier=earlier,
        profile=examine.profile,
    )


def _components(config: RunConfig, request: Request, profile: Profile) -> Iterator[Component]:
    cluster, apart = config.cluster, request.rollout_nodes or 0
    gpus = cluster.devices_per_node if cluster.device == "cuda" else 0
    yield Component(nodes=cluster.nodes - apart, partition=profile.partition, gpus=gpus)
    if apart:
        yield Component(nodes=apart, partition=request.rollout_partition or profile.partition, gpus=gpus)
