"""From a launch request to its batch jobs, or to every problem that it has."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megarl.config import ConfigError, Problem, RunConfig, TrainingConfig
from megarl.config.inheritance import merged
from megarl.config.problems import is_pending
from megarl.config.schema import Model
from megarl.launch.checker import Checker, load_checked, profile_problems
from megarl.launch.profile import Profile, found_profile, load_profile
from megarl.launch.render import BatchJob
from megarl.launch.request import (
    JOB_RAY,
    LaunchMode,
    LaunchRequest,
    as_option,
    names_other_ray,
    run_directory,
    submitted_as,
)


class RefusedError(ValueError):
    """A request cannot be submitted; the message has every problem."""


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """A job, the configuration of its run, and remarks for the user."""

    job: BatchJob
    config: RunConfig
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ChainedRun:
    """A run of a chain, and the model with which it is checked: for one that a run exports, that run's own model."""

    config: RunConfig
    checked_model: Model


def plan(request: LaunchRequest) -> list[PlannedJob]:
    """Returns the jobs of a request, each of which waits for the previous one. Raises RefusedError for any problem."""
    errors: list[ConfigError] = []
    profile = _collect(errors, partial(_profile, request))
    checker = Checker(request, profile or Profile())
    wrong = [*request.malformed(), *_sbatch_missing(request, checker)]
    if wrong:
        errors.append(ConfigError(wrong, "command line"))
    planned = _chain(request, checker, errors)
    if errors:
        raise RefusedError("\n".join(map(str, errors)))
    return planned


def _collect[T](errors: list[ConfigError], make: Callable[[], T]) -> T | None:
    """Returns the result of `make`, or appends its error and returns None."""
    try:
        return make()
    except ConfigError as error:
        errors.append(error)
        return None


def _profile(request: LaunchRequest) -> Profile:
    try:
        profile = load_profile(request.profile, request.settings)
        problems = list(profile_problems(profile))
        if problems:
            raise ConfigError(problems)
        return profile
    except ConfigError as error:
        problems = [as_option(problem, request.settings) for problem in error.problems]
    of_file = any(not problem.field.startswith("--") for problem in problems)
    raise ConfigError(problems, str(found_profile(request.profile) or "command line") if of_file else "command line")


def _sbatch_missing(request: LaunchRequest, checker: Checker) -> Iterator[Problem]:
    submits = not (request.dry_run or request.mode is LaunchMode.LOCAL or checker.remote)
    if submits and shutil.which("sbatch") is None:
        fix = "submit from a login node of the cluster, or write and show the script with --dry-run"
        yield Problem(field="sbatch", value="not found", rule="Slurm's commands are on the PATH", fix=fix)


def _chain(request: LaunchRequest, checker: Checker, errors: list[ConfigError]) -> list[PlannedJob]:
    """Returns one job per configuration."""
    runs: list[ChainedRun] = []
    planned: list[PlannedJob] = []
    refused: list[Path] = []
    owners: dict[Path, Path] = {}
    for path in request.configs:
        if (overrides := _collect(errors, partial(_overrides, path, request))) is None:
            continue
        named = run_directory(path, overrides)
        run_dirs = [] if named is None else [Path(named).absolute()]
        for run_dir in run_dirs:
            if run_dir in owners:
                rule = f"a directory of its own; {owners[run_dir]} has this one too"
                fix = "set it in the files, not for all"
                problem = Problem(field="run.dir", value=str(run_dir), rule=rule, fix=fix)
                errors.append(ConfigError([problem], str(path)))
            owners[run_dir] = path
        run = _collect(errors, partial(_load_chained, path, overrides, runs, checker, refused))
        if run is None:
            refused += run_dirs
            continue
        earlier = tuple(checker.workdir / before.config.run.dir for before in runs)
        planned.append(_job(run.config, request, checker, earlier))
        runs.append(run)
    return planned


def _load_chained(
    path: Path, overrides: Sequence[str], earlier: Sequence[ChainedRun], check: Checker, refused: Collection[Path]
) -> ChainedRun:
    """Reads and checks a configuration as far as possible before the earlier runs, of which some are refused."""
    raw, _ = merged(path, overrides)
    pending = [*(Path(run.config.run.dir) for run in earlier), *refused]
    stand_in = _stand_in(raw.get("model"), earlier)
    config = load_checked(path, [*overrides, *stand_in], check, pending)
    if not stand_in:
        return ChainedRun(config=config, checked_model=config.model)
    own = {"path": raw["model"]["path"], "random": None, "tokenizer": raw["model"].get("tokenizer")}
    model = config.model.model_copy(update=own)
    return ChainedRun(config=config.model_copy(update={"model": model}), checked_model=config.model)


def _stand_in(model: Any, earlier: Sequence[ChainedRun]) -> list[str]:
    """Returns overrides that replace a model which an earlier run will export by that run's initial model."""
    path = model.get("path") if isinstance(model, dict) else None
    for run in earlier:
        if run.config.exports_initial_architecture and is_pending(path, [Path(run.config.run.dir)]):
            start = run.checked_model
            random = None if start.random is None else start.random.model_dump(mode="json")
            fields = {"path": start.path, "random": random}
            if model.get("tokenizer") is None:
                fields["tokenizer"] = start.tokenizer
            return [f"model.{name}={json.dumps(value)}" for name, value in fields.items()]
    return []


def _overrides(path: Path, request: LaunchRequest) -> list[str]:
    """Returns the request's overrides and those of the job."""
    sizes = {"nodes": request.nodes, "devices_per_node": request.gpus_per_node}
    given = [*request.overrides, *(f"cluster.{name}={size}" for name, size in sizes.items() if size is not None)]
    problems = list(names_other_ray(path, request.overrides))
    if problems and request.mode is not LaunchMode.LOCAL:
        raise ConfigError(problems, str(path))
    return given if request.mode is LaunchMode.LOCAL else [*given, JOB_RAY]


def _job(config: RunConfig, request: LaunchRequest, checker: Checker, earlier: tuple[Path, ...]) -> PlannedJob:
    run_dir = checker.workdir / config.run.dir
    job = BatchJob(
        title=" ".join(f"{config.stage} in {config.run.dir}".split()),
        name=request.job_name or run_dir.name,
        command="train" if isinstance(config, TrainingConfig) else "eval",
        workdir=checker.workdir,
        run_dir=run_dir,
        config=checker.workdir / submitted_as(config),
        nodes=config.cluster.nodes,
        partition=checker.profile.partition,
        gpus=config.cluster.devices_per_node if config.cluster.device == "cuda" else 0,
        dependent=bool(earlier) or request.dependency is not None,
        earlier=earlier,
        profile=checker.profile,
    )
    return PlannedJob(job=job, config=config, remarks=tuple(checker.unchecked(config)))
