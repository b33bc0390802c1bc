"""A run's length in epochs: the resulting steps, and refusals."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import yaml

from megarl.config import ConfigError, TrainingConfig, load, save
from megarl.launch.checker import is_not_finished
from megarl.preflight.check import check
from megarl.preflight.epochs import with_steps
from megarl.preflight.memory_plan import plan_memory
from megarl.role_specs import role_specs
from megarl.run.directory import RunDirectory
from tests.config.debug import DEBUG, by_field
from tests.data.rows import jsonl


def resolved(stage: str, *overrides: str) -> TrainingConfig:
    config = load(DEBUG.with_stem(stage), ["run.steps=null", *overrides])
    config = with_steps(config, check(config))
    assert isinstance(config, TrainingConfig)
    return config


@pytest.mark.parametrize(
    ("stage", "size", "epochs", "steps"),
    [
        ("ppo", "data.prompts_per_step=8", "2", 8),  # of 32 random prompts
        ("ppo", "data.prompts_per_step=5", "1", 6),
        ("ppo", "data.prompts_per_step=5", "2", 12),  # 64 / 5: a step at the end of a pass continues with the next one
        ("ppo", "data.prompts_per_step=8", "0.75", 3),
        ("raft", "data.prompts_per_step=10", "1", 3),
        ("sft", "data.sequences_per_step=3", "1", 10),
        ("reward_model", "data.pairs_per_step=32", "3", 3),
    ],
)
def test_epochs_are_whole_steps(stage: str, size: str, epochs: str, steps: int) -> None:
    config = resolved(stage, size, f"run.epochs={epochs}", "algo.mini_batches=1" if stage == "ppo" else "run.seed=0")
    assert (config.steps, config.run.steps, config.run.epochs) == (steps, steps, float(epochs))


def test_decimal_fractions_of_a_pass_are_exact(tmp_path: Path) -> None:
    rows = jsonl(tmp_path, [{"token_ids": [3]}] * 100, "prompts.jsonl")
    given = ["data.random=null", f"data.prompts={rows.path}", "data.prompts_per_step=1", "algo.mini_batches=1"]
    assert resolved("ppo", *given, "run.epochs=0.29").steps == 29  # 0.29 * 100 is 28.999999999999996 in floats


def test_skipped_rows_are_not_counted(tmp_path: Path) -> None:
    rows = jsonl(tmp_path, [{"token_ids": [3] * (99 if n % 2 else 2)} for n in range(16)], "prompts.jsonl")
    given = ["data.random=null", f"data.prompts={rows.path}", "data.prompts_per_step=4", "data.too_long=drop"]
    assert resolved("ppo", *given, "run.epochs=5").steps == 10


def test_schedules_cover_the_steps_of_the_epochs() -> None:
    config = resolved("ppo", "run.epochs=2", "critic.warmup_steps=1")
    by_steps = load(DEBUG, ["run.steps=8", "critic.warmup_steps=1"])
    assert role_specs(config, "train") == role_specs(by_steps, "train")


def test_memory_is_planned_without_rows() -> None:
    config = with_steps(load(DEBUG, ["run.steps=null", "run.epochs=2", "model.vocab_size=null"]))
    assert {plan.device for plan in plan_memory(config)} == {0, 1, 2, 3}


def test_a_finished_run_is_not_launched_again_with_the_same_epochs(tmp_path: Path) -> None:
    save(resolved("sft", f"run.dir={tmp_path}", "run.epochs=2"), tmp_path / "config.yaml")
    (tmp_path / "summary.json").write_text('{"stage": "sft", "steps": 16}')
    again, more = (load(tmp_path / "config.yaml", ["run.steps=null", f"run.epochs={epochs}"]) for epochs in (2, 3))
    assert [problem.field for problem in is_not_finished(again)] == ["run.dir"]
    assert not list(is_not_finished(more))


def refusal(*overrides: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        check(load(DEBUG, overrides))
    return by_field(caught.value)


def test_invalid_epochs_are_refused() -> None:
    assert (
        "divided by the 8 of a step and rounded down, is 0" in refusal("run.steps=null", "run.epochs=0.2")["run.epochs"]
    )
    assert (
        "does not fit run.epochs = 1: 1 times 32 usable rows, divided by the 8 of a step and rounded down, is 4"
        in refusal("run.epochs=1")["run.steps"]
    )  # and run.steps = 3
    waits = refusal("run.steps=null", "run.epochs=1", "critic.warmup_steps=4")
    assert waits == {"critic.warmup_steps": "below run.steps = 4: the actor would not be trained"}


def test_a_run_saves_steps_and_epochs_and_continues_with_more_epochs(tmp_path: Path) -> None:
    run = f"run.dir={tmp_path / 'run'}"
    first = resolved("sft", run, "run.epochs=1", "data.sequences_per_step=8")
    with closing(RunDirectory(first)) as directory:
        kept = yaml.safe_load(directory.config.read_text())["run"]
    assert (kept["steps"], kept["epochs"]) == (4, 1.0)
    again = load(directory.config)  # as it stands, the two numbers agree
    assert with_steps(again, check(again)) == first
    save(first, tmp_path / "more.yaml")
    with pytest.raises(ConfigError, match="set the other to null"):
        check(load(tmp_path / "more.yaml", ["run.epochs=2"]))
    more = load(tmp_path / "more.yaml", ["run.steps=null", "run.epochs=2"])
    with closing(RunDirectory(with_steps(more, check(more)))) as directory:
        assert yaml.safe_load(directory.config.read_text())["run"]["steps"] == 8
