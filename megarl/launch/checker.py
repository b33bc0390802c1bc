"""Checks that a valid configuration can be launched as requested."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile

from megarl.config import ConfigError, Problem, RunConfig, TrainingConfig, parse_devices
from megarl.config.schema import TrainingRun
from megarl.files import read_json
from megarl.launch.profile import SSH, Bare, Profile
from megarl.launch.request import LaunchRequest, unwritable
from megarl.preflight.check import check
from megarl.preflight.models import without_weights
from megarl.run.paths import RunPaths, read_config


class Checker:
    """Checks that a configuration can run, and fits the request and the cluster; does not read a remote job's files."""

    def __init__(self, request: LaunchRequest, profile: Profile) -> None:
        self.request = request
        self.profile = profile
        self.remote = False
        self.workdir = Path.cwd()
        tunnel = profile.nemo_run.tunnel
        if request.mode == "tunnel" and isinstance(tunnel, SSH):
            self.remote = True
            self.workdir = Path(tunnel.directory)

    def __call__(self, config: RunConfig) -> None:
        """Checks a configuration; raises a ConfigError with every problem."""
        run_dir = Path(config.run.dir)
        problems = [*_devices_fit(config, self.request)]
        problems += _paths_are_plain(run_dir, self.profile, self.workdir)
        unchecked = ""
        if not self.remote:
            problems += is_not_finished(config, chain=len(self.request.configs) > 1)
            problems += _is_writable(run_dir)
            try:
                check(config, bare=self.request.dry_run)
            except ConfigError as error:
                problems += error.problems
                unchecked = error.unchecked
        if problems:
            raise ConfigError(problems, unchecked=unchecked)

    def unchecked(self, config: RunConfig) -> list[str]:
        """Returns a remark for each model of a dry run that has no weights yet."""
        if self.remote:
            return []
        remark = "has a config.json and no weights yet; a dry run does not need them, the job does"
        return [f"{field}: {path} {remark}" for field, path in without_weights(config).items()]


def is_not_finished(config: RunConfig, *, chain: bool = False) -> Iterator[Problem]:
    """Checks that the run in run.dir is not finished."""
    try:
        taken = read_json(RunPaths(config.run.dir).summary)["steps"]
    except (OSError, ValueError, KeyError):
        return
    if not isinstance(config, TrainingConfig):
        fix = "choose another run.dir, or remove the directory"
        rule = "must not hold a finished evaluation"
        yield Problem("run.dir", config.run.dir, rule, fix)
    elif _has_ended(config.run, taken):
        others = "leave it out, or choose another run.dir" if chain else "or choose another run.dir"
        fix = f"raise {config.run.length_field} to continue it, {others}"
        rule = f"a run that is not finished; this one has taken its {taken} steps"
        yield Problem("run.dir", config.run.dir, rule, fix)


def _has_ended(run: TrainingRun, taken: int) -> bool:
    """Whether a run ends at the steps that it has taken; does not count its rows again."""
    if run.epochs is None:
        return run.steps is not None and run.steps <= taken
    kept = read_config(RunPaths(run.dir).config).get("run", {}).get("epochs")
    return kept is not None and run.epochs <= kept


def _devices_fit(config: RunConfig, request: LaunchRequest) -> Iterator[Problem]:
    """Checks that every node is used."""
    gpus = request.gpus_per_node
    if gpus is not None and config.cluster.device == "cpu":
        rule = "the configuration's devices are virtual ones of the CPU (cluster.device = cpu)"
        fix = "remove it, and set cluster.devices_per_node"
        yield Problem("--gpus-per-node", str(gpus), rule, fix)
    devices: list[int] = []
    for section in (*config.groups.values(), config.engine_settings, config.judge_model):
        if section is not None:
            devices += parse_devices(section.devices)
    nodes = config.cluster.nodes
    used = {device // config.cluster.devices_per_node for device in devices}
    idle = sorted(set(range(nodes)) - used)
    if idle:
        names = ", ".join(map(str, idle))
        rule = f"every node must have a device that the run uses; {names} (from 0) has none"
        fix = f"place groups or rollout there, or set --nodes {len(used)}"
        yield Problem("cluster.nodes", str(nodes), rule, fix)


def _is_writable(run_dir: Path) -> Iterator[Problem]:
    """Checks the directory or its nearest existing parent."""
    present = run_dir.absolute()
    while not os.path.exists(present):
        present = present.parent
    try:
        TemporaryFile(dir=present).close()
    except OSError as error:
        yield unwritable(run_dir, error)


def _paths_are_plain(run_dir: Path, profile: Profile, workdir: Path) -> Iterator[Problem]:
    """Checks that Slurm and the containers can express the paths of the job's directories."""
    runtime = profile.runtime
    fix = "choose another one"
    for field, path in (("run.dir", run_dir.absolute()), ("the present directory", workdir)):
        text = str(path)
        if "\\" in text or not text.isprintable():
            rule = "without backslashes and line breaks, which Slurm reads in its own way"
            yield Problem(field, repr(text), rule, fix)
        elif not isinstance(runtime, Bare) and re.search(r"[:,]", text):
            rule = f"a path that {runtime.name} can mount: without colons and commas"
            yield Problem(field, text, rule, fix)
