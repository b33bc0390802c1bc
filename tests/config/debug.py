"""The debug configurations that the tests of this folder start from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.config import ConfigError, Problem, load
from megarl.stages.ppo.config import PPOConfig

REPOSITORY = Path(__file__).resolve().parents[2]
DEBUG = REPOSITORY / "configs" / "debug" / "ppo.yaml"

Case = tuple[list[str], str] | tuple[list[str], str, str]
"""Overrides of a debug run, the field that is named, and a part of the rule's text.

Without a field, it is that of the last override.
"""
Cases = dict[Any, list[Case]]
"""By rule."""


def debug(*overrides: str) -> PPOConfig:
    """The debug run of PPO with overrides."""
    config = load(DEBUG, overrides)
    assert isinstance(config, PPOConfig)
    return config


def refused(*overrides: str, stage: str = "ppo") -> dict[str, str]:
    """The rules that a stage's debug run with overrides breaks, by field."""
    with pytest.raises(ConfigError) as caught:
        load(DEBUG.with_stem(stage), overrides)
    return by_field(caught.value)


def problems(*overrides: str, stage: str = "ppo") -> dict[str, Problem]:
    """What is wrong with a stage's debug run with overrides, by field; the last problem of each."""
    with pytest.raises(ConfigError) as caught:
        load(DEBUG.with_stem(stage), overrides)
    return {problem.field: problem for problem in caught.value.problems}


def by_field(error: ConfigError) -> dict[str, str]:
    """The broken rules of an error by field; several of one field in several lines."""
    rules: dict[str, str] = {}
    for problem in error.problems:
        rules[problem.field] = "\n".join(filter(None, (rules.get(problem.field), problem.rule)))
    return rules


def without(group: str, roles: Sequence[str]) -> list[str]:
    """Overrides that remove roles from a group."""
    return [f"groups.{group}.roles.{role}=null" for role in roles]


ACTOR = "groups.train.roles.actor"
SPARE = ["groups.spare.devices=3-4", "cluster.devices_per_node=8"]
JUDGE = [
    "reward.judge_model={path: a, devices: 4-6, template: 'Is {response} right?', pattern: '(.)'}",
    "cluster.devices_per_node=7",
]
OWN_DEVICE = ["rollout.devices=4", "cluster.devices_per_node=5"]
GRPO = [
    *without("train", ["critic", "reference"]),
    "critic=null",
    "algo={advantage: grpo, value_loss: mse, kl: {coef: 0}}",
]
FUNCTIONS = "reward.functions=[{name: length}]"
PTX = "ptx={data: a/b, max_tokens: 32, sequences_per_mini_batch: 4, coef: 0.5}"
MIXTURE = [
    "model.random.config={model_type: mixtral, num_local_experts: 6, num_experts_per_tok: 2}",
    f"{ACTOR}.sequence_parallel=true",
    "groups.train.roles.reference.sequence_parallel=true",
]
EVALUATION = "evaluation={prompts: a/b, functions: [{name: length}]}"
HELD_OUT_TASKS = ["evaluation={prompts: null, tasks: 4, first_task: 8}", "environment.name=openenv"]
