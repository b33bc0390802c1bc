"""Checks that a valid configuration can be launched as requested."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from megarl.config import ConfigError, Problem, RunConfig, TrainingConfig, load, parse_devices
from megarl.config.problems import without_pending
from megarl.config.schema import TrainingRun
from megarl.launch.field_types import seconds_of
from megarl.launch.profile import SSH, Apptainer, Bare, Profile
from megarl.launch.render import mounts
from megarl.launch.request import LaunchMode, LaunchRequest, unwritable
from megarl.preflight.check import check
from megarl.preflight.models import without_weights
from megarl.run.paths import RunPaths, read_config

_EARLY_S = 60  # Slurm may send its signal this much early (sbatch's manual, --signal)


class Checker:
    """Checks that a configuration can run, and fits the request and the cluster.

    The files of a configuration are read once, however often it is checked; those of a remote job are not read.
    """

    def __init__(self, request: LaunchRequest, profile: Profile) -> None:
        self.request = request
        self.profile = profile
        tunnel = profile.nemo_run.tunnel if request.mode is LaunchMode.TUNNEL else None
        self.remote = isinstance(tunnel, SSH)
        self.workdir = Path(tunnel.directory) if isinstance(tunnel, SSH) else Path.cwd()
        self._checked: dict[str, ConfigError | None] = {}

    def __call__(self, config: RunConfig) -> None:
        """Checks a configuration; raises a ConfigError with every problem."""
        error = None if self.remote else self._preflight(config)
        problems = [*self._misfits(config), *(() if error is None else error.problems)]
        if problems:
            raise ConfigError(problems, unchecked="" if error is None else error.unchecked)

    def _preflight(self, config: RunConfig) -> ConfigError | None:
        """Returns the problems of the models, data and functions that the configuration names."""
        key = config.model_dump_json(by_alias=True)
        if key not in self._checked:
            try:
                check(config, bare=self.request.dry_run)
                self._checked[key] = None
            except ConfigError as error:
                self._checked[key] = error
        return self._checked[key]

    def unchecked(self, config: RunConfig) -> Iterator[str]:
        """Yields a remark for each model of a dry run that has no weights yet."""
        for field, path in {} if self.remote else without_weights(config).items():
            yield f"{field}: {path} has a config.json and no weights yet; a dry run does not need them, the job does"

    def _misfits(self, config: RunConfig) -> Iterator[Problem]:
        run_dir = Path(config.run.dir)
        if not self.remote:
            yield from is_not_finished(config, chain=len(self.request.configs) > 1)
        yield from _devices_fit(config, self.request)
        if not self.remote and (error := write_error(run_dir)):
            yield unwritable(run_dir, error)
        yield from _paths_are_plain(run_dir, self.profile, self.workdir)
        yield from _paths_are_mounted(config, self.profile, self.workdir)


def load_checked(
    path: Path, overrides: Sequence[str], check: Callable[[RunConfig], object], pending: Collection[Path] = ()
) -> RunConfig:
    """Reads and checks a configuration; earlier runs will write what is missing in `pending` directories."""
    config = load(path, overrides, check, pending_paths=pending)
    try:
        check(config)
    except ConfigError as error:
        problems = without_pending(error.problems, config.model_dump(by_alias=True), pending)
        if problems:
            raise ConfigError(problems, str(path), error.unchecked) from None
    return config


def profile_problems(profile: Profile) -> Iterator[Problem]:
    """Checks the fields of a profile against each other."""
    if profile.time is not None and profile.grace and seconds_of(profile.time) <= profile.grace + _EARLY_S:
        rule = f"longer than grace, {profile.grace} s, and the {_EARLY_S} s by which Slurm may be early with its signal"
        fix = "raise time, or lower grace (--grace 0 leaves the end to Slurm)"
        yield Problem(field="time", value=profile.time, rule=rule, fix=fix)
    if profile.gpu_type is not None and profile.gpu_request == "none":
        rule = "has an effect where GPUs are asked for"
        fix = "remove it, or set gpu_request"
        yield Problem(field="gpu_type", value=profile.gpu_type, rule=rule, fix=fix)


def is_not_finished(config: RunConfig, *, chain: bool = False) -> Iterator[Problem]:
    """Checks that the run in run.dir is not finished."""
    summary = Path(config.run.dir) / "summary.json"
    try:
        taken = json.loads(summary.read_text(encoding="utf-8"))["steps"]
    except (OSError, ValueError, KeyError):
        return
    if not isinstance(config, TrainingConfig):
        fix = "choose another run.dir, or remove the directory"
        yield Problem(field="run.dir", value=config.run.dir, rule="no finished evaluation is there", fix=fix)
    elif _ends(config.run, taken):
        leave = "leave it out, " if chain else ""
        fix = f"raise {config.run.length_field} to continue it, {leave}or choose another run.dir"
        rule = f"a run that is not finished; this one has taken its {taken} steps"
        yield Problem(field="run.dir", value=config.run.dir, rule=rule, fix=fix)


def _ends(run: TrainingRun, taken: int) -> bool:
    """Whether a run ends at the steps that it has taken; its rows are not counted again."""
    if run.epochs is None:
        return run.steps is not None and run.steps <= taken
    kept = read_config(RunPaths(run.dir).config).get("run", {}).get("epochs")
    return kept is not None and run.epochs <= kept


def _devices_fit(config: RunConfig, request: LaunchRequest) -> Iterator[Problem]:
    """Checks that every node is used."""
    nodes = config.cluster.nodes
    per_node = config.cluster.devices_per_node
    trainers = {device for name in config.groups for device in config.device_list(name)}
    rollout = config.engine_settings
    engines = set[int]() if rollout is None else set(parse_devices(rollout.devices))
    if request.gpus_per_node is not None and config.cluster.device == "cpu":
        rule = "the configuration's devices are virtual ones of the CPU (cluster.device = cpu)"
        fix = "remove it, and set cluster.devices_per_node"
        yield Problem(field="--gpus-per-node", value=str(request.gpus_per_node), rule=rule, fix=fix)
    judge = config.judge_model
    judges = set[int]() if judge is None else set(parse_devices(judge.devices))
    used = {device // per_node for device in trainers | engines | judges}
    if idle := [node for node in range(nodes) if node not in used]:
        rule = f"every node has a device that the run uses; {', '.join(map(str, idle))} (from 0) has none"
        fix = f"place groups or rollout there, or set --nodes {len(used)}"
        yield Problem(field="cluster.nodes", value=str(nodes), rule=rule, fix=fix)


def write_error(directory: Path) -> OSError | None:
    """Returns why files cannot be written to a directory, or to its nearest existing parent; None if they can."""
    present = next(path for path in (directory, *directory.absolute().parents) if os.path.exists(path))
    try:
        TemporaryFile(dir=present).close()
    except OSError as error:
        return error
    return None


def _paths_are_plain(run_dir: Path, profile: Profile, workdir: Path) -> Iterator[Problem]:
    """Checks that Slurm and the containers can express the paths of the job's directories."""
    contained = not isinstance(profile.runtime, Bare)
    for field, path in (("run.dir", run_dir.absolute()), ("the present directory", workdir)):
        text = str(path)
        if "\\" in text or not text.isprintable():
            rule = "without backslashes and line breaks, which Slurm reads in its own way"
            yield Problem(field=field, value=repr(text), rule=rule, fix="choose another one")
        elif contained and re.search(r"[:,]", text):
            rule = f"a path that {profile.runtime.name} can mount: without colons and commas"
            yield Problem(field=field, value=text, rule=rule, fix="choose another one")


def _paths_are_mounted(config: RunConfig, profile: Profile, workdir: Path) -> Iterator[Problem]:
    """Checks that a container sees the files that the configuration names; hub names look like relative paths."""
    if isinstance(profile.runtime, Bare):
        return
    mounted = mounts(profile.runtime, workdir, [Path(config.run.dir).absolute()])
    seen = [Path(os.path.normpath(mount.split(":")[1])) for mount in mounted]
    if isinstance(profile.runtime, Apptainer):
        seen += [Path.home(), Path("/tmp")]  # mounted by default
    for field, path in _paths(config.model_dump(by_alias=True)):
        place = Path(os.path.normpath(workdir / path))
        if not any(place.is_relative_to(directory) for directory in seen):
            rule = f"in a directory that the container sees: {', '.join(map(str, seen))}"
            fix = (
                f"add one above it to the profile's runtime.mounts, or give --mounts {place.parent}; what a "
                "configuration names must have the same path inside and outside"
            )
            yield Problem(field=field, value=str(path), rule=rule, fix=fix)


def _paths(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Path]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _paths(value, f"{above}{key}.")
        elif key in ("path", "tokenizer", "replay") and isinstance(value, str):
            yield f"{above}{key}", Path(value)
