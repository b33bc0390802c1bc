"""The configurations of the demo: files passed between the three stages, and PPO's layouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.sort_letters.checkpoint import MAX_POSITIONS, write_checkpoint
from examples.sort_letters.data import HELD_OUT_ROWS, TRAIN_ROWS, write_data
from examples.sort_letters.task import MAX_LETTERS, MAX_PROMPT_TOKENS
from megarl.config import load
from megarl.stages.ppo.config import PPOConfig
from megarl.stages.reward_model.config import RewardModelConfig
from megarl.stages.sft.config import SFTConfig

CONFIGS = Path(__file__).parents[2] / "configs" / "demo"
LONGEST_PROMPT = MAX_PROMPT_TOKENS + 1  # <bos>


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[SFTConfig, RewardModelConfig, PPOConfig]:
    """The three stages' configurations, in a place where the files that they name exist."""
    place = tmp_path_factory.mktemp("demo")
    for directory in ("model", "sft/export", "reward_model/export"):
        write_checkpoint(place / "runs/demo" / directory, seed=0)
    write_data(place / "runs/demo/data", seed=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        sft, reward_model, ppo = (load(CONFIGS / f"{stage}.yaml") for stage in ("sft", "reward_model", "ppo"))
    assert isinstance(sft, SFTConfig)
    assert isinstance(reward_model, RewardModelConfig)
    assert isinstance(ppo, PPOConfig)
    return sft, reward_model, ppo


Demo = tuple[SFTConfig, RewardModelConfig, PPOConfig]


def test_each_stage_starts_from_the_one_before(demo: Demo) -> None:
    sft, reward_model, ppo = demo
    assert sft.model.path == "runs/demo/model"
    assert reward_model.model.path == ppo.model.path == f"{sft.run.dir}/export"
    assert ppo.critic is not None
    assert ppo.reward.path == ppo.critic.path == f"{reward_model.run.dir}/export"


def test_training_reads_training_files_and_evaluation_held_out_ones(demo: Demo) -> None:
    sft, reward_model, ppo = demo
    assert reward_model.normalisation is not None
    assert ppo.data.prompts is not None
    trained = (sft.data.train, reward_model.data.train, reward_model.normalisation.prompts, ppo.data.prompts)
    assert all(source.path.endswith("_train.jsonl") for source in trained)
    assert ppo.evaluation is not None
    held_out = (sft.data.evaluation, reward_model.data.evaluation, ppo.evaluation.prompts)
    assert all(source is not None and source.path.endswith("_held_out.jsonl") for source in held_out)


def test_training_never_sees_the_true_score(demo: Demo) -> None:
    _, _, ppo = demo
    assert not ppo.reward.functions
    assert ppo.evaluation is not None
    assert [function.name for function in ppo.evaluation.functions] == ["examples.sort_letters.task:exact_match"]
    assert HELD_OUT_ROWS["prompts"] * ppo.evaluation.samples_per_prompt >= 512


def test_the_roles_of_ppo_have_different_layouts_in_one_group(demo: Demo) -> None:
    _, _, ppo = demo
    layouts = [ppo.layout(role) for role in ("actor", "critic", "reference", "reward")]
    assert (layouts[0].tp, layouts[0].pp) == (2, 2)
    assert len(set(layouts)) == 4
    assert len(ppo.groups) == 1
    assert ppo.rollout.engines == 1


def test_length_limits_fit_the_longest_row(demo: Demo) -> None:
    sft, reward_model, ppo = demo
    doubled = LONGEST_PROMPT + MAX_LETTERS + len("d") + 1  # a letter twice, and the end token
    assert sft.data.max_tokens >= doubled
    assert reward_model.data.max_tokens >= doubled
    assert ppo.rollout.max_new_tokens == MAX_LETTERS + 1
    assert MAX_POSITIONS >= ppo.rollout.max_model_len >= LONGEST_PROMPT + ppo.rollout.max_new_tokens


def test_ppo_uses_no_prompt_twice(demo: Demo) -> None:
    _, _, ppo = demo
    assert ppo.run.steps * ppo.data.prompts_per_step <= TRAIN_ROWS["prompts"]
