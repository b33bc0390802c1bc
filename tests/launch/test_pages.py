"""The pages on clusters agree with the program: commands, fields, profiles."""

from __future__ import annotations

import re
import shlex

import pytest
import typer
import yaml

from megarl.cli import app
from megarl.cluster.ray_node import ENVIRONMENT
from megarl.launch.profile import Profile
from tests.config.debug import REPOSITORY

PAGES = {name: (REPOSITORY / "docs" / name).read_text(encoding="utf-8") for name in ("slurm.md", "ray.md")}


def commands(page: str) -> list[str]:
    """Commands of megarl in the page's blocks of shell, as one line each."""
    whole = PAGES[page].replace("\\\n", " ")
    return [
        line.partition(" #")[0] for line in re.findall(r"^ {4,}(?:ray job .* )?(megarl .*)$", whole, flags=re.MULTILINE)
    ]


@pytest.mark.parametrize(("page", "line"), [(page, line) for page in PAGES for line in commands(page)])
def test_documented_commands_parse(page: str, line: str) -> None:
    command, (_, *arguments) = typer.main.get_command(app), shlex.split(line)
    while hasattr(command, "commands"):
        name, *arguments = arguments
        command = command.commands[name]
    command.make_context(command.name, arguments)  # a wrong option raises
    assert "megarl" in line, page


def test_the_commands_are_found() -> None:
    assert len(commands("slurm.md")) >= 8
    assert len(commands("ray.md")) >= 3


def test_every_profile_field_is_documented_with_its_default() -> None:
    table = PAGES["slurm.md"].partition("## The profile")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| (`.+?) \| (.+?) \| .+ \|$", table, flags=re.MULTILINE)
    told = {name: default.strip("`") for names, default in rows for name in re.findall(r"`(\w+)`", names)}
    assert set(told) == set(Profile.model_fields)
    for name, field in Profile.model_fields.items():
        if told[name] in ("null", "true") or told[name].isdigit():
            assert yaml.safe_load(told[name]) == field.default, name


@pytest.mark.process
def test_documented_profiles_are_valid() -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```", PAGES["slurm.md"], flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        assert Profile.model_validate(yaml.safe_load(block)) != Profile()


def test_the_cluster_for_kubernetes_offers_the_devices_that_its_workers_have() -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```", PAGES["ray.md"], flags=re.MULTILINE | re.DOTALL)
    (workers,) = yaml.safe_load(block)["spec"]["workerGroupSpecs"]
    # KubeRay puts the value on a command line of the shell, which takes one pair of quotes away.
    (resources,) = shlex.split(workers["rayStartParams"]["resources"])
    gpus = workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert yaml.safe_load(resources) == {"device": int(gpus)}


def test_documented_clusters_are_started_like_those_of_a_run() -> None:
    ours = {f"{name}={value}" for name, value in ENVIRONMENT.items() if value in ("0", "false") and "USAGE" not in name}
    by_hand = set(re.findall(r"export (RAY_\w+=(?:0|false))", PAGES["ray.md"]))
    pods = {f"{name}={value}" for name, value in re.findall(r"{name: (RAY_\w+), value: \"(.+?)\"}", PAGES["ray.md"])}
    assert by_hand == pods == ours - {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0"}
