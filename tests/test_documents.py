"""Files, settings and commands in the documents exist and work."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
import tomllib
from pathlib import Path

import pytest
import yaml

from megarl.config import ConfigError, load
from megarl.init import NewRun
from megarl.models import FAMILIES
from megarl.preflight.user_functions import check_functions
from megarl.run.paths import RunPaths, ema_export
from megarl.stages.ppo.config import PPOConfig
from tests.config.debug import REPOSITORY, debug

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
QUICKSTART = (REPOSITORY / "docs" / "quickstart.md").read_text(encoding="utf-8")
MAKEFILE = (REPOSITORY / "Makefile").read_text(encoding="utf-8")


@pytest.mark.parametrize(("page", "least"), [("CONTRIBUTING.md", 40), ("docs/weights.md", 10)])
def test_a_page_names_files_that_exist(page: str, least: int) -> None:
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)`", (REPOSITORY / page).read_text(encoding="utf-8")))
    bases = (REPOSITORY / "megarl", REPOSITORY, REPOSITORY / "tests" / "weights")
    assert len(named) > least
    assert not [name for name in named if "NAME" not in name and not any((base / name).exists() for base in bases)]


@pytest.mark.parametrize("overrides", re.findall(r"^\|[^|]+\| `([^`]+=[^`]+)` \|$", QUICKSTART, flags=re.MULTILINE))
def test_the_overrides_of_the_quickstart_load(overrides: str) -> None:
    assert debug(*shlex.split(overrides)) != debug()


def test_the_configuration_of_the_readme_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines are among those that `megarl init` writes, and load by themselves."""
    block, devices = re.findall(r"^    (?:defaults|cluster): .*\n(?:    .*\n)+", README, flags=re.MULTILINE)
    (init,) = re.findall(r"^    megarl init (\w+) --model (\S+) --prompts (\S+) ", README, flags=re.MULTILINE)
    name, model, prompts = init
    (row,) = re.findall(r"^`(\{.*\})`:$", README, flags=re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    Path(model).mkdir(parents=True)
    fields = {**debug().model.hf_config(), "max_position_embeddings": 4096}
    Path(model, "config.json").write_text(json.dumps(fields), encoding="utf-8")
    Path(prompts).write_text(row, encoding="utf-8")
    NewRun(name=name, recipe="grpo", model=model, prompts=prompts, steps=100).write()
    written = yaml.safe_load(Path("mine.yaml").read_text(encoding="utf-8"))
    shown = yaml.safe_load(textwrap.dedent(block))
    assert len(shown) == 6
    assert shown.pop("defaults") == written["defaults"]
    for section, values in shown.items():
        assert values.items() <= written[section].items()
    Path("short.yaml").write_text(textwrap.dedent(block), encoding="utf-8")
    assert load("short.yaml").cluster.devices_per_node == 1
    for short in ("short.yaml", "mine.yaml"):
        Path("eight.yaml").write_text(f"defaults: [{short}]\n{textwrap.dedent(devices)}", encoding="utf-8")
        assert load("eight.yaml").cluster.devices_per_node == 8


def test_every_file_of_a_run_directory_is_listed(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "run-directory.md").read_text(encoding="utf-8")
    table = page.split("(`run.dir`) has:")[1].split("\n\n")[1]
    listed = set(re.findall(r"`([\w.-]+)(?:/[^`]*)?`", table))
    paths = RunPaths(tmp_path)
    files = set(vars(paths).values()) - {paths.path, paths.lock}
    assert {file.name for file in files} <= listed
    assert ema_export(paths.export).name in listed


@pytest.mark.parametrize("page", ["docs/quickstart.md", "docs/evaluation.md"])
def test_a_hub_name_is_refused_with_the_documented_command(page: str) -> None:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    (command,) = re.findall(r"^    (hf download .*)$", text, flags=re.MULTILINE)
    model, directory = re.findall(r"^hf download (\S+) --local-dir (\S+)$", command)[0]
    with pytest.raises(ConfigError, match=command.replace(directory, model)):
        debug(f"model={{path: {model}, random: null}}")


def test_the_example_of_the_recipes_can_be_run(tmp_path: Path) -> None:
    text = (REPOSITORY / "docs" / "recipes.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^    defaults: .*\n(?:    .*\n)+", text, flags=re.MULTILINE)
    path = tmp_path / "mine.yaml"
    path.write_text(textwrap.dedent(block), encoding="utf-8")
    model = {**debug().model.hf_config(), "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(model), encoding="utf-8")
    config = load(path, [f"model.path={tmp_path}"])
    assert isinstance(config, PPOConfig)
    assert not check_functions(config.reward.functions)


@pytest.mark.parametrize(("stage", "section"), [("reward_model", "reward"), ("dpo", "preference"), ("raft", "algo")])
def test_the_settings_of_the_stages_load(tmp_path: Path, stage: str, section: str) -> None:
    text = (REPOSITORY / "docs" / "stages.md").read_text(encoding="utf-8")
    (block,) = re.findall(rf"^    {section}:\n(?:    .*\n)+", text, flags=re.MULTILINE)
    path = tmp_path / "run.yaml"
    defaults = f"defaults: [{REPOSITORY}/configs/debug/{stage}.yaml]\n"
    path.write_text(defaults + textwrap.dedent(block), encoding="utf-8")
    overrides = ["reward.optimizer.final_lr=0"] if stage == "reward_model" else []
    assert load(path, overrides) != load(REPOSITORY / "configs" / "debug" / f"{stage}.yaml")


def test_named_extras_exist_and_are_installed_from_the_checkout() -> None:
    """The package is on no index."""
    files = [*(REPOSITORY / "docs").glob("*.md"), *(REPOSITORY / "megarl").rglob("*.py")]
    texts = README + "".join(file.read_text(encoding="utf-8") for file in files)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    named = set(re.findall(r"pip install (?:--no-build-isolation )?(?:-e )?'\.\[([\w-]+)\]'", texts))
    assert {"gpu", "math", "reasoning-gym", "verifiers", "ray", "te"} <= named <= extras
    assert f"{project['name']}[" not in texts


def test_make_targets_exist() -> None:
    named = set(re.findall(r"`make ([\w-]+)", README + CONTRIBUTING))
    assert {"setup", "demo", "test", "lint", "bench", "clean"} <= named
    assert named <= set(re.findall(r"^([\w-]+):", MAKEFILE, flags=re.MULTILINE))


def test_every_family_is_documented() -> None:
    text = (REPOSITORY / "docs" / "weights.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE) == ["model_type", *FAMILIES]


def test_links_resolve_to_files() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README + CONTRIBUTING)
    assert links
    assert all(Path(REPOSITORY, link).exists() for link in links)
