"""Cluster profiles: their fields, and overrides on the command line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megarl.config import ConfigError
from megarl.launch.field_types import OWN_OPTIONS
from megarl.launch.profile import Apptainer, Bare, Profile, Pyxis, load_profile
from tests.config.debug import by_field
from tests.launch.scripts import GOLDEN


def loaded(directory: Path, text: str, **settings: Any) -> Profile:
    """The profile of a file, with settings on top."""
    file = directory / "cluster.yaml"
    file.write_text(text)
    return load_profile(file, settings)


def test_the_users_profile_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_profile() == Profile()
    (tmp_path / ".config/megarl").mkdir(parents=True)
    (tmp_path / ".config/megarl/cluster.yaml").write_text("partition: own\n")
    assert load_profile().partition == "own"
    assert loaded(tmp_path, "account: lab\n").partition is None
    assert loaded(tmp_path, "").account is None


@pytest.mark.parametrize(
    ("text", "given", "expected"),
    [
        ("runtime: bare", {"python": "/p"}, Bare(python="/p")),
        ("", {"python": "/p"}, Bare(python="/p")),
        ("runtime: {name: pyxis, image: i, python: p}", {"image": "j"}, Pyxis(name="pyxis", image="j", python="p")),
        ("runtime: {name: pyxis, image: i}", {"name": "bare"}, Bare()),
        ("runtime: {name: pyxis, image: i}", "bare", Bare()),
    ],
)
def test_settings_replace_fields_and_extend_mappings(
    tmp_path: Path, text: str, given: object, expected: object
) -> None:
    text += "\nenv: {A: 1, B: b, name: me}\nsbatch: [--comment=x]\n"
    env = {"B": "c", "name": "you"}
    profile = loaded(tmp_path, text, runtime=given, env=env, sbatch=["--mail-type=END"])
    assert profile.runtime == expected
    assert dict(profile.env) == {"A": "1", "B": "c", "name": "you"}
    assert profile.sbatch == ("--mail-type=END",)


@pytest.mark.process
@pytest.mark.parametrize(
    ("text", "field", "rule"),
    [
        ("partion: a", "partion", "unknown key"),
        ("runtime: docker", "runtime", "one of bare, pyxis, apptainer"),
        ("runtime: {name: pyxis, image: i, options: [--x]}", "runtime.options", "unknown option of pyxis"),
        ("runtime: {name: apptainer, image: i, mounts: ['/a b']}", "runtime.mounts", "without spaces"),
        ("gpu_request: all", "gpu_request", "'gpus-per-node', 'gres' or 'none'"),
        ("time: 12:00:00", "time", "should be text"),  # YAML reads a number to the base of 60
        ("interface: eth0 eth1", "interface", "the name of one interface"),
        ("start_limit: 0", "start_limit", "greater than 0"),
        ("env: {a-b: 1}", "env.a-b", "letters, digits and underscores"),
        ("env: {RAY_AUTH_TOKEN: secret}", "env.RAY_AUTH_TOKEN", "each job makes its own, and keeps it out of files"),
        ("env: {A: secret, SLURM_NODEID: 0}", "env.SLURM_NODEID", "Slurm sets it"),
        ("sbatch: [--partition=x]", "sbatch", "should be without --partition=x (set the field partition)"),
        ("sbatch: [-N3]", "sbatch", "-N3 (write it as --name=value)"),
        ("sbatch: [--qos=a, --comment=c, --no-requeue]", "sbatch", "--qos=a (set the field qos), --no-requeue (set"),
        ("srun: [--container-image=x]", "srun", "set the field runtime.image"),
        ("srun: [--cpu-bind=cores]", "srun", "may use all of its CPUs"),
        ("runtime: {python: ~/v/bin/python}", "runtime.python", "~ is not read"),
        ("runtime: {name: apptainer, image: ~/i.sif}", "runtime.image", "~ is not read"),
        ("runtime: {name: pyxis, image: i, mounts: ['/a:/b:/c:/d']}", "runtime.mounts", "not /a:/b:/c:/d"),
        ('account: "a\\nb"', "account", "a line of text"),
        ("partition: ''", "partition", "a line of text"),
    ],
)
def test_mistakes_are_reported(tmp_path: Path, text: str, field: str, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, text)
    found = by_field(caught.value)
    assert list(found) == [field]
    assert rule in found[field]
    assert str(tmp_path / "cluster.yaml") in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["pyxis", "apptainer"])
def test_other_containers_accept_mount_options(tmp_path: Path, name: str) -> None:
    runtime = loaded(tmp_path, f"runtime: {{name: {name}, image: i, mounts: ['/a:/a:ro']}}").runtime
    assert isinstance(runtime, Pyxis | Apptainer)
    assert runtime.mounts == ("/a:/a:ro",)


def test_all_other_options_pass_through(tmp_path: Path) -> None:
    options = ["--array=0-3%2", "--mem-bind=local", "--time-min=10", "--error=x", "--gpus=2", "--no-kill"]
    assert loaded(tmp_path, "", sbatch=options, srun=["--container-writable"]).sbatch == tuple(options)


def test_exactly_the_options_that_the_scripts_give_are_refused() -> None:
    """Every option of the script and of the command line that submits it, under either value of a switch."""
    scripts = "".join(file.read_text(encoding="utf-8") for file in GOLDEN.glob("*.sbatch"))
    sbatch = set(re.findall(r'^#SBATCH "?(--[a-z-]+)', scripts, re.MULTILINE)) - {"--comment", "--mail-type"}
    assert set(OWN_OPTIONS["sbatch"]) == sbatch | {"--dependency"}
    commands = re.findall(r"^srun .*?megarl\.launch\.node", scripts, re.MULTILINE | re.DOTALL)
    srun = {option for command in commands for option in re.findall(r" (--[a-z-]+)=", command)} - {"--mpi"}
    assert set(OWN_OPTIONS["srun"]) == srun
