"""Keys of other systems: every suggested field exists, and the page equals the table."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
from transformers import TrainingArguments

from megarl.config import ConfigError, load
from megarl.config.foreign_keys import SYSTEMS, foreign_keys
from megarl.config.schema import stage_class, stage_classes
from megarl.config.schema.schema_walk import has_path
from tests.config.debug import REPOSITORY
from tools.docs import foreign_keys_page

ROWS = [row for rows in foreign_keys().values() for row in rows]


def fix(override: str, config: str = "grpo") -> str:
    with pytest.raises(ConfigError) as caught:
        load(REPOSITORY / "configs" / "debug" / f"{config}.yaml", [override])
    return next(problem.fix for problem in caught.value.problems if override.startswith(problem.field))


def test_the_page_is_up_to_date() -> None:
    page = (REPOSITORY / "docs" / "from-trl-verl.md").read_text(encoding="utf-8")
    assert page == foreign_keys_page.markdown(), "run make docs"


def test_every_suggested_field_exists_in_a_stage() -> None:
    named = {path for row in ROWS for path in row.ours}
    assert not [path for path in named if not any(has_path(schema, path) for schema in stage_classes().values())]
    assert not has_path(stage_class("ppo"), "algo.policy_loss.epsilon")
    assert not has_path(stage_class("sft"), "data.samples_per_prompt")


def test_every_system_has_many_keys_without_duplicates() -> None:
    for system in SYSTEMS:
        keys = Counter(key for row in ROWS for key in row.keys.get(system, ()))
        assert not [key for key, count in keys.items() if count > 1], system
        assert len(keys) >= 30, (system, len(keys))
    assert len(ROWS) >= 60


def test_trls_keys_are_fields_of_its_configurations() -> None:
    """The file has the names in TRL 1.16.0: of GRPOConfig, RLOOConfig, DPOConfig, GKDConfig, SFTConfig and the like."""
    fields = {
        *Path(__file__).with_name("trl_fields.txt").read_text(encoding="utf-8").split(),
        *(field.name for field in dataclasses.fields(TrainingArguments)),
    }
    assert {key for row in ROWS for key in row.keys.get("trl", ())} - fields == set()


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("num_generations=8", "data.samples_per_prompt"),
        ("rollout.n=4", "data.samples_per_prompt"),
        ("data.train_batch_size=8", "data.prompts_per_step"),
        ("actor.ppo_mini_batch_size=4", "algo.mini_batches (a size there, a count here"),
        ("rollout.gpu_memory_utilization=0.5", "rollout.gpu_memory_fraction"),
        ("algo.policy_loss.epsilon_high=0.28", "algo.policy_loss.clip_high"),
        ("algo.beta=0.1", "algo.kl.coef"),
        ("algo.kl_coef=0.1", "algo.kl.coef"),
        ("algo.adv_estimator=grpo", "algo.advantage"),
        ("num_train_epochs=1", "run.epochs"),
        ("trainer.total_epochs=1", "run.epochs"),
        ("actor.learning_rate=1e-6", "actor.optimizer.lr"),
        ("groups.train.roles.actor.context_parallel_size=2", "nothing like it yet"),
        ("model.lora_rank=8", "use actor.lora.rank"),
        ("load_in_4bit=true", "nothing like it yet"),
        ("use_vllm=true", "remove it: vLLM is the only engine"),
        ("bf16=true", "dtype of its config.json"),
        ("rollout.multi_turn.tool_config_path=tools.yaml", "docs/environments.md"),
        ("gradient_checkpointing=true", "recompute"),
        ("actor_rollout_ref={rollout: {n: 4}, actor: {clip_ratio: 0.2}}", "rollout.n: use data.samples_per_prompt"),
        # the configuration's own keys in other places, and slips, are answered as they are without the table
        ("temperature=1.0", "did you mean rollout.temperature or"),
        ("actor.lr=1e-6", "did you mean actor.optimizer.lr?"),
        ("run.stepz=3", "did you mean run.steps?"),
        ("run.name=x", "known here: dir, seed, steps, epochs"),
        ("mine={a: [{num_generations: 8}]}", "remove it; known here: stage, run"),
    ],
)
def test_an_unknown_key_suggests_our_field(override: str, path: str) -> None:
    assert path in fix(override)


def test_the_suggestion_fits_the_stage() -> None:
    assert "data.sequences_per_step" in fix("per_device_train_batch_size=8", "sft")
    assert "data.prompts_per_step" in fix("per_device_train_batch_size=8")
    assert "data.evaluate_every" in fix("eval_steps=8", "sft")
