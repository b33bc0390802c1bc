"""The pages on clusters agree with the program: commands, options, fields, messages, links."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml

from megarl.cli import app
from megarl.cluster.ray_node import ENVIRONMENT
from megarl.launch.profile import Apptainer, Profile, Pyxis
from megarl.launch.render import render
from megarl.launch.request import OPTIONS
from tests.config.debug import REPOSITORY
from tests.launch.scripts import JOBS

PAGES = {name: (REPOSITORY / "docs" / name).read_text(encoding="utf-8") for name in ("slurm.md", "ray.md")}
PACKAGE = sorted((REPOSITORY / "megarl").rglob("*.py"))


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


def texts() -> list[str]:
    """Every text in the source, with a mark where something is filled in, and the templates."""
    found = [file.read_text(encoding="utf-8") for file in (REPOSITORY / "slurm").glob("*.j2")]
    for file in PACKAGE:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


OF_OTHERS = {
    "cd: can't cd to",
    "not found",
    "No module named megarl",
    "(DependencyNeverSatisfied)",
    "Failed to connect to Ray at address",
    "Authentication required",
}
"""Messages of the shell, of Python, of Slurm and of Ray."""


@pytest.mark.parametrize("page", PAGES)
def test_documented_messages_exist_in_the_source(page: str) -> None:
    filled_in = re.compile(r"\d+|SIG[A-Z]+")
    table = PAGES[page].partition("## When it fails")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE)
    assert len(cells) >= 6
    quoted = [piece for cell in cells for text in re.findall(r"`(.+?)`", cell) for piece in text.split(" ... ")]
    known = [filled_in.sub("\0", text) for text in texts()]
    ours = [piece for piece in quoted if piece not in OF_OTHERS]
    assert not [piece for piece in ours if not any(filled_in.sub("\0", piece) in text for text in known)]


def test_documented_script_lines_exist() -> None:
    table = PAGES["slurm.md"].partition("## The script")[2].partition("\n## ")[0]
    options = re.findall(r"--[a-z-]+", " ".join(re.findall(r"^\| (`.+?`) \|", table, flags=re.MULTILINE)))
    assert len(options) > 10
    assert not [option for option in options if option not in render(JOBS["bare"])]


def test_every_profile_field_is_documented_with_its_default() -> None:
    table = PAGES["slurm.md"].partition("## The profile")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| (`.+?) \| (.+?) \| .+ \|$", table, flags=re.MULTILINE)
    told = {name: default.strip("`") for names, default in rows for name in re.findall(r"`(\w+)`", names)}
    assert set(told) == set(Profile.model_fields)
    for name, field in Profile.model_fields.items():
        if told[name] in ("null", "true") or told[name].isdigit():
            assert yaml.safe_load(told[name]) == field.default, name


def test_every_container_field_is_documented_with_its_option() -> None:
    table = PAGES["slurm.md"].partition("| field of a container")[2].partition("\n\n")[0]
    told = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", table, flags=re.MULTILINE))
    kinds = (Pyxis, Apptainer)
    fields = {info.alias or name for kind in kinds for name, info in kind.model_fields.items() if name != "name"}
    assert set(told) == fields
    assert {option.strip("`") for option in told.values()} - {"none"} == {
        OPTIONS[f"runtime.{field}"] for field in fields if f"runtime.{field}" in OPTIONS
    }


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


@pytest.mark.parametrize("page", PAGES)
def test_links_resolve_to_files_and_headings(page: str) -> None:
    here = REPOSITORY / "docs"
    for target in re.findall(r"\]\(([^)]+)\)", PAGES[page]):
        path, _, heading = target.partition("#")
        if path.startswith("https://"):
            continue
        assert not path or Path(here, path).exists(), target
        text = Path(here, path).read_text() if path else PAGES[page]
        headings = [line.strip("# ").lower().replace(" ", "-") for line in text.splitlines() if line[:1] == "#"]
        assert not heading or heading in headings, target
