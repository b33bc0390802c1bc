"""Algorithms as stages: the same configuration as ppo with the settings of the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.config import ConfigError, RunConfig, build, load
from megarl.config.inheritance import SHORT_STAGES
from megarl.stages.ppo.config import PPOConfig
from tests.config.debug import REPOSITORY

DEFINING = ("advantage", "normalise", "policy_loss", "aggregation", "filter", "select")
BASE = yaml.safe_load((REPOSITORY / "configs/debug/base.yaml").read_text())
OWN: dict[str, Any] = {
    **BASE,
    "run": {"dir": "runs/x", "steps": 2},
    "groups": {"train": {"devices": 0, "roles": {"actor": {}}}},
    "rollout": {"devices": 1, "max_new_tokens": 32, "max_model_len": 64},
    "data": {
        "random": {"count": 64, "min_tokens": 4, "max_tokens": 16},
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
    },
    "actor": {"optimizer": {"lr": 1e-4}},
    "reward": {"functions": [{"name": "soft_overlong", "args": {"max_tokens": 32, "buffer_tokens": 32}}]},
}


def given(stage: str, **algo: Any) -> RunConfig:
    return build({**OWN, "stage": stage, **({"algo": algo} if algo else {})})


@pytest.mark.parametrize("stage", SHORT_STAGES)
def test_a_short_stage_is_ppo_with_the_settings_of_the_recipe(stage: str) -> None:
    recipe = yaml.safe_load((REPOSITORY / f"configs/recipes/{stage}.yaml").read_text())["algo"]
    assert given(stage) == given("ppo", **{key: recipe[key] for key in DEFINING if key in recipe})


def test_user_settings_override_a_short_stage(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump({**OWN, "stage": "dapo", "algo": {"policy_loss": {"clip": 0.1}}}))
    expected = {"policy_loss": {"name": "ppo", "clip": 0.1, "clip_high": 0.28}, "aggregation": "sequence_mean"}
    group = {"advantage": {"name": "grpo", "eps": 1e-6, "ddof": 1}, "filter": "nonzero_std"}
    assert load(file, ["algo.aggregation=sequence_mean"]) == given("ppo", **expected, **group)
    config = load(file, ["algo.filter=null", "algo.advantage=rloo", "algo.policy_loss=reinforce"])
    assert isinstance(config, PPOConfig)
    assert (config.algo.filter, config.algo.advantage.name) == (None, "rloo")
    assert (config.algo.policy_loss.name, config.algo.policy_loss.options) == ("reinforce", {})


def test_options_that_a_file_adds_to_a_name_keep_the_name(tmp_path: Path) -> None:
    """The name and its options come from two files, and differ from the short stage's."""
    (tmp_path / "below.yaml").write_text(yaml.safe_dump({**OWN, "algo": {"advantage": "rloo"}}))
    file = tmp_path / "own.yaml"
    file.write_text("defaults: [below.yaml]\nstage: grpo\nalgo: {advantage: {singleton: raw}}")
    config = load(file)
    assert isinstance(config, PPOConfig)
    assert (config.stage, config.algo.advantage.name) == ("ppo", "rloo")
    assert config.algo.advantage.options == {"singleton": "raw"}


def test_the_command_line_may_name_a_short_stage(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump({**OWN, "stage": "ppo"}))
    assert load(file, ["stage=gspo"]) == given("gspo")


@pytest.mark.parametrize("stage", ["raft", "grpo"])
def test_settings_of_another_form_than_the_short_stages_are_refused(stage: str) -> None:
    with pytest.raises(ConfigError, match=r"\n  algo = .*\n    rule: must fit the settings of stage .* not a list"):
        given(stage, select={"by": ["x"]}, advantage=["x"])


def test_an_unknown_stage_lists_the_short_ones_or_is_a_loss_of_preferences() -> None:
    with pytest.raises(ConfigError) as caught:
        given("grppo")
    (problem,) = caught.value.problems
    assert all(name in problem.fix for name in SHORT_STAGES)
    with pytest.raises(ConfigError, match=r"fix:  write stage: dpo, with preference: {loss: kto}"):
        given("kto")
