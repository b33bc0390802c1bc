"""The recipes: complete except for the user's fields, with their sources, and listed in the documentation."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.config import load

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "configs/recipes").glob("*.yaml"))
TINY = ROOT / "configs/debug/base.yaml"


ROWS = {"dpo": "pairs.jsonl", "sft": "demonstrations.jsonl"}


def stage_of(recipe: Path) -> str:
    return yaml.safe_load(recipe.read_text())["stage"]


def given_for_rows(recipe: Path, place: Path) -> dict[str, Any]:
    """What a user adds to a recipe of stage dpo or sft, with the roles that it names."""
    (named,) = re.findall(r"groups \((.*?)\)", recipe.read_text())
    return {
        "defaults": [str(TINY), str(recipe)],
        "run": {"dir": str(place / "run"), "steps": 100},
        "groups": {"train": {"devices": 0, "roles": {role: {} for role in named.split(", ")}}},
        "data": {"train": str(ROOT / "configs/debug/data" / ROWS[stage_of(recipe)]), "max_tokens": 64},
    }


def given(recipe: Path, place: Path) -> dict[str, Any]:
    """What a user adds, with the roles that the recipe names."""
    own = yaml.safe_load(recipe.read_text())
    roles = ["actor", *["critic"] * ("critic" in own), *["reference"] * ("kl" in own.get("algo", {}))]
    added: dict[str, Any] = {
        "defaults": [str(TINY), str(recipe)],
        "run": {"dir": str(place / "run"), "steps": 100},
        "groups": {"train": {"devices": 0, "roles": {role: {} for role in [*roles, "reward"]}}},
        "rollout": {"devices": 1, "max_new_tokens": 32, "max_model_len": 64},
        "data": {"random": {"count": 1024, "min_tokens": 4, "max_tokens": 16}},
    }
    if "reference.path" in recipe.read_text():
        added["reference"] = {"path": str(place)}
        del added["groups"]["train"]["roles"]["reward"]
    if "critic" in own:
        added["critic"] = {"path": str(place)}
    if "ptx" in own:
        added["ptx"] = {"data": str(ROOT / "configs/debug/data/demonstrations.jsonl"), "max_tokens": 64}
    return added


@pytest.mark.parametrize("recipe", FILES, ids=lambda file: file.stem)
def test_a_recipe_requires_exactly_the_fields_that_it_lists(recipe: Path, tmp_path: Path) -> None:
    model = yaml.safe_load(TINY.read_text())["model"]["random"]["config"]
    (tmp_path / "config.json").write_text(json.dumps(model))
    adds = given if stage_of(recipe) == "ppo" else given_for_rows
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(adds(recipe, tmp_path)))
    assert load(tmp_path / "mine.yaml").stage == stage_of(recipe)


@pytest.mark.parametrize("recipe", FILES, ids=lambda file: file.stem)
def test_a_recipe_documents_its_source_and_its_differences(recipe: Path) -> None:
    text = recipe.read_text()
    for heading in ("# Source: ", "# Yours: ", "# Differs from its source:\n# - "):
        assert text.count(heading) == 1, heading
    assert f"| `{recipe.stem}` |" in (ROOT / "docs/recipes.md").read_text()
