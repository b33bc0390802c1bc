"""From a launch request to its batch jobs, or to every problem that it has."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.config import ConfigError, Problem, RunConfig, TrainingConfig, as_yaml, load
from megarl.config.inheritance import merged
from megarl.config.problems import is_pending, without_pending
from megarl.config.schema import Model
from megarl.launch.checker import Checker
from megarl.launch.profile import Profile, load_profile
from megarl.launch.render import BatchJob
from megarl.launch.request import JOB_RAY, LaunchRequest, other_ray
from megarl.run.paths import JOBS


class RefusedError(ValueError):
    """A request cannot be submitted; the message has every problem."""


Planned = Sequence[tuple[BatchJob, RunConfig]]
"""Jobs, each of which waits for the previous one, with the configurations of their runs."""


def plan(request: LaunchRequest) -> tuple[Planned, list[str]]:
    """Returns a request's jobs, and remarks for the user.

    Raises:
        RefusedError: with all problems.
    """
    errors: list[ConfigError] = []
    profile = Profile()
    try:
        profile = load_profile(request.profile, request.settings)
    except ConfigError as error:
        errors.append(error)
    checker = Checker(request, profile)
    wrong = list(request.malformed())
    submits = not (request.dry_run or request.mode == "local" or checker.remote)
    if submits and shutil.which("sbatch") is None:
        rule = "Slurm's commands must be on the PATH"
        fix = "submit from a login node of the cluster, or write and show the script with --dry-run"
        wrong.append(Problem("sbatch", "not found", rule, fix))
    if wrong:
        errors.append(ConfigError(wrong, "command line"))
    planned, refused = _chain(request, checker)
    errors += refused
    if errors:
        raise RefusedError("\n".join(map(str, errors)))
    return planned, [remark for _, config in planned for remark in checker.unchecked(config)]


def _chain(request: LaunchRequest, checker: Checker) -> tuple[Planned, list[ConfigError]]:
    """Returns a job per configuration that can run, and the errors of the others."""
    planned: list[tuple[BatchJob, RunConfig]] = []
    bases: dict[Path, Model] = {}
    errors: list[ConfigError] = []
    owners: dict[Path, Path] = {}
    for path in request.configs:
        overrides = _overrides(request)
        pending = list(owners)
        try:
            raw, _ = merged(path, overrides)
            run_dir = _run_directory(raw)
            if run_dir in owners:
                rule = f"a directory of its own; {owners[run_dir]} has this one too"
                fix = "set it in the files, not for all"
                problem = Problem("run.dir", str(run_dir), rule, fix)
                errors.append(ConfigError([problem], str(path)))
            if run_dir is not None:
                owners[run_dir] = path
            if request.mode != "local":
                problems = other_ray(raw)
                if problems:
                    raise ConfigError(problems, str(path))
                overrides.append(JOB_RAY)
            config = _load(path, overrides, raw.get("model"), checker, bases, pending)
        except ConfigError as error:
            errors.append(error)
            continue
        earlier = tuple(job.run_dir for job, _ in planned)
        planned.append((_job(config, request, checker, earlier), config))
    return planned, errors


def _overrides(request: LaunchRequest) -> list[str]:
    overrides = list(request.overrides)
    if request.nodes is not None:
        overrides.append(f"cluster.nodes={request.nodes}")
    if request.gpus_per_node is not None:
        overrides.append(f"cluster.devices_per_node={request.gpus_per_node}")
    return overrides


def _run_directory(raw: Mapping[str, Any]) -> Path | None:
    """Returns run.dir of a configuration that may be invalid."""
    run = raw.get("run")
    if isinstance(run, Mapping) and isinstance(run.get("dir"), str):
        return Path(run["dir"]).absolute()
    return None


def _load(
    path: Path,
    overrides: Sequence[str],
    model: Any,
    check: Checker,
    bases: dict[Path, Model],
    pending: Collection[Path],
) -> RunConfig:
    """Reads and checks a configuration as far as possible before the earlier runs.

    Args:
        model: the section `model` of the file, unchecked.
        bases: models with the architectures that earlier runs will export, by their directories;
            that of this run is added.
        pending: directories of all earlier runs, also of those with mistakes.
    """
    stand_in = _stand_in(model, bases)
    config = load(path, [*overrides, *stand_in], check, pending_paths=pending)
    try:
        check(config)
    except ConfigError as error:
        problems = without_pending(error.problems, config.model_dump(by_alias=True), pending)
        if problems:
            raise ConfigError(problems, str(path), error.unchecked) from None
    if config.exports_initial_architecture:
        bases[Path(config.run.dir)] = config.model
    if stand_in:
        exported = {"path": model["path"], "random": None, "tokenizer": model.get("tokenizer")}
        config = config.model_copy(update={"model": config.model.model_copy(update=exported)})
    return config


def _stand_in(model: Any, bases: Mapping[Path, Model]) -> list[str]:
    """Returns overrides that replace the model that an earlier run will export."""
    path = model.get("path") if isinstance(model, dict) else None
    for run_dir, base in bases.items():
        if is_pending(path, [run_dir]):
            start = base.model_dump(mode="json")
            names = ["path", "random"]
            if model.get("tokenizer") is None:
                names.append("tokenizer")
            return [f"model.{name}={json.dumps(start[name])}" for name in names]
    return []


def _job(config: RunConfig, request: LaunchRequest, checker: Checker, earlier: tuple[Path, ...]) -> BatchJob:
    run_dir = checker.workdir / config.run.dir
    digest = hashlib.sha256(as_yaml(config).encode()).hexdigest()
    cluster = config.cluster
    return BatchJob(
        title=" ".join(f"{config.stage} in {config.run.dir}".split()),
        name=request.job_name or run_dir.name,
        command="train" if isinstance(config, TrainingConfig) else "eval",
        workdir=checker.workdir,
        run_dir=run_dir,
        config=run_dir / JOBS / f"config-{digest[:8]}.yaml",
        nodes=cluster.nodes,
        gpus=cluster.devices_per_node if cluster.device == "cuda" else 0,
        dependent=bool(earlier) or request.dependency is not None,
        earlier=earlier,
        profile=checker.profile,
    )
