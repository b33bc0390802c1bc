"""What a submission asks of a configuration that is sound in itself."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final

from megarl.config import ConfigError, EvalConfig, Problem, RunConfig, TrainingConfig, parse_devices
from megarl.config.problems import shown
from megarl.config.schema import Rollout
from megarl.launch.profile import SSH, Apptainer, Bare, Enroot, Profile
from megarl.launch.render import mounts
from megarl.launch.request import Request, Way
from megarl.launch.values import seconds_of
from megarl.preflight.check import check

_EARLY_S = 60
"""The signal before the time limit may come so much earlier (Slurm: sbatch's manual, --signal)."""
_NAMES_NOTHING: Final[Any] = {"run": True, "actor": {"optimizer"}, "critic": {"optimizer"}}
"""Parts of a configuration that name neither models nor data nor functions."""


class Examination:
    """What a submission asks of every configuration: that it can run, and that it fits the request and the cluster.

    What a configuration names beyond itself, models and data, is read once for runs that read the same.

    Args:
        request: of the submission.
        profile: of the cluster.

    Attributes:
        elsewhere: the jobs run where this machine sees no files; what configurations name there is not looked at.
        present: directory in which the jobs will work.
    """

    def __init__(self, request: Request, profile: Profile) -> None:
        self.request, self.profile = request, profile
        tunnel = profile.nemo_run.tunnel if request.way is Way.TUNNEL else None
        self.elsewhere = isinstance(tunnel, SSH)
        self.present = Path(tunnel.directory) if isinstance(tunnel, SSH) else Path.cwd()
        self._read: dict[str, ConfigError | None] = {}

    def __call__(self, config: RunConfig) -> None:
        """Checks a configuration that may break rules between its fields.

        Raises:
            ConfigError: it lists every problem.
        """
        beyond = None if self.elsewhere else self._beyond(config)
        problems = [*self._misfits(config), *(() if beyond is None else beyond.problems)]
        if problems:
            raise ConfigError(problems, unchecked="" if beyond is None else beyond.unchecked)

    def _beyond(self, config: RunConfig) -> ConfigError | None:
        """What is wrong with what the configuration names."""
        key = config.model_dump_json(by_alias=True, exclude=_NAMES_NOTHING)
        if key not in self._read:
            try:
                check(config)
            except ConfigError as error:
                self._read[key] = error
            else:
                self._read[key] = None
        return self._read[key]

    def finished(self, config: RunConfig) -> list[Problem]:
        """That there is nothing left to do in run.dir, where it can be looked at; empty where there is."""
        return [] if self.elsewhere else list(is_not_finished(config, chain=len(self.request.configs) > 1))

    def _misfits(self, config: RunConfig) -> Iterator[Problem]:
        """What the configuration, the request and the profile have against each other."""
        if not self.request.sweeps:  # the finished cells of a sweep are left out
            yield from self.finished(config)
        yield from _devices_are_real(config, self.request)
        yield from _nodes_are_used(config)
        yield from _components_are_apart(config, self.request)
        run_dir = Path(config.run.dir)
        if not self.elsewhere:
            yield from _can_be_made(run_dir.parent if self.request.sweeps else run_dir)
        yield from _paths_can_be_said(run_dir, self.profile, self.present)
        yield from _paths_are_seen(config, self.profile, self.present)


def profile_problems(profile: Profile) -> Iterator[Problem]:
    """What of a profile does not go together."""
    if profile.time is not None and profile.grace and seconds_of(profile.time) <= profile.grace + _EARLY_S:
        rule = f"longer than grace, {profile.grace} s, and the {_EARLY_S} s by which Slurm may be early with its signal"
        fix = "raise time, or lower grace (--grace 0 leaves the end to Slurm)"
        yield Problem(field="time", value=profile.time, rule=rule, fix=fix)
    if profile.gpu_type is not None and profile.gpu_request == "none":
        rule, fix = "has an effect where GPUs are asked for", "remove it, or set gpu_request"
        yield Problem(field="gpu_type", value=profile.gpu_type, rule=rule, fix=fix)


def is_not_finished(config: RunConfig, *, chain: bool = False) -> Iterator[Problem]:
    """There is something left to do in run.dir."""
    summary = Path(config.run.dir) / "summary.json"
    try:
        taken = json.loads(summary.read_text(encoding="utf-8"))["steps"]
    except (OSError, ValueError, KeyError):
        return
    if isinstance(config, EvalConfig):
        fix = "choose another run.dir, or remove the directory"
        yield Problem(field="run.dir", value=config.run.dir, rule="no finished evaluation is there", fix=fix)
    elif isinstance(config, TrainingConfig) and config.run.steps <= taken:
        fix = f"raise run.steps to go on with it, {'leave it out, ' if chain else ''}or choose another run.dir"
        rule = f"a run that is not finished; this one has taken its {taken} steps"
        yield Problem(field="run.dir", value=config.run.dir, rule=rule, fix=fix)


def _devices_are_real(config: RunConfig, request: Request) -> Iterator[Problem]:
    if request.gpus_per_node is not None and config.cluster.device == "cpu":
        rule = "the configuration's devices are virtual ones of the CPU (cluster.device = cpu)"
        fix = "remove it, and set cluster.devices_per_node"
        yield Problem(field="--gpus-per-node", value=str(request.gpus_per_node), rule=rule, fix=fix)


def _nodes_are_used(config: RunConfig) -> Iterator[Problem]:
    """No node is there for nothing."""
    per_node = config.cluster.devices_per_node
    used = {device // per_node for device in _trainers(config) | _engines(config)}
    idle = [node for node in range(config.cluster.nodes) if node not in used]
    if idle:
        rule = f"every node has a device that the run uses; {', '.join(map(str, idle))} (from 0) has none"
        fix = f"place groups or rollout there, or set --nodes {len(used)}"
        yield Problem(field="cluster.nodes", value=str(config.cluster.nodes), rule=rule, fix=fix)


def _components_are_apart(config: RunConfig, request: Request) -> Iterator[Problem]:
    """The engines, and nothing else, are on the last nodes, where those are a component of their own."""
    split = request.rollout_nodes
    if split is None:
        return
    if split >= config.cluster.nodes:
        rule = f"fewer than the job's nodes, {config.cluster.nodes}, of which they are the last ones"
        yield Problem(field="--rollout-nodes", value=str(split), rule=rule, fix="lower it, or raise --nodes")
        return
    first = (config.cluster.nodes - split) * config.cluster.devices_per_node
    trainers, engines = _trainers(config), _engines(config)
    if not engines or min(engines) < first or max(trainers, default=0) >= first:
        rule = f"the engines have devices from {first} on, and the groups those below"
        fix = f"set rollout.devices and the groups' devices so, or remove --rollout-nodes {split}"
        value = getattr(getattr(config, "rollout", None), "devices", None)
        yield Problem(field="rollout.devices", value=shown(value), rule=rule, fix=fix)


def _can_be_made(directory: Path) -> Iterator[Problem]:
    """The directory, of the run or above those of a sweep, takes files, or else what is there of the path to it."""
    present = next(path for path in (directory, *directory.absolute().parents) if os.path.exists(path))
    try:
        TemporaryFile(dir=present).close()
    except OSError as error:
        rule, fix = f"can be written ({error.strerror})", "choose another run.dir"
        yield Problem(field="run.dir", value=str(directory), rule=rule, fix=fix)


def _paths_can_be_said(run_dir: Path, profile: Profile, present: Path) -> Iterator[Problem]:
    """Slurm and the containers take the directories of the job."""
    contained = not isinstance(profile.runtime, Bare)
    for field, path in (("run.dir", run_dir.absolute()), ("the present directory", present)):
        text = str(path)
        if "\\" in text or not text.isprintable():
            rule = "without backslashes and line breaks: Slurm would read them otherwise"
            yield Problem(field=field, value=repr(text), rule=rule, fix="choose another one")
        elif contained and re.search(r"[:,]" + (r"|\s" if isinstance(profile.runtime, Enroot) else ""), text):
            rule = f"a path that {profile.runtime.name} can mount: without colons, commas and, of enroot, spaces"
            yield Problem(field=field, value=text, rule=rule, fix="choose another one")


def _paths_are_seen(config: RunConfig, profile: Profile, present: Path) -> Iterator[Problem]:
    """A container sees the models and the data that are named by paths; names of a hub look like relative ones."""
    if isinstance(profile.runtime, Bare):
        return
    mounted = mounts(profile.runtime, present, [Path(config.run.dir).absolute()])
    seen = [Path(os.path.normpath(mount.split(":")[1])) for mount in mounted]
    if isinstance(profile.runtime, Apptainer):
        seen += [Path.home(), Path("/tmp")]  # it mounts these by itself
    for field, path in _paths(config.model_dump(by_alias=True)):
        place = Path(os.path.normpath(present / path))
        if not any(place.is_relative_to(directory) for directory in seen):
            rule = f"in a directory that the container sees: {', '.join(map(str, seen))}"
            fix = (
                f"add one above it to the profile's runtime.mounts, or give --mounts {place.parent}; what a "
                "configuration names must have the same path inside and outside"
            )
            yield Problem(field=field, value=str(path), rule=rule, fix=fix)


def _paths(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Path]]:
    """What a configuration reads, with its field."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _paths(value, f"{above}{key}.")
        elif key in ("path", "tokenizer", "replay") and isinstance(value, str):
            yield f"{above}{key}", Path(value)


def _trainers(config: RunConfig) -> set[int]:
    return {device for name in config.groups for device in config.device_list(name)}


def _engines(config: RunConfig) -> set[int]:
    rollout = getattr(config, "rollout", None)
    return set(parse_devices(rollout.devices)) if isinstance(rollout, Rollout) else set()
