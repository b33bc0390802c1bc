"""The configuration of a reward model's training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from megarl.config.problems import Broken
from megarl.config.schema import Normalisation, RewardTraining, Rollout
from megarl.config.schema.loss_specs import LossSpec, NewHead, PreferenceSpec
from megarl.config.schema.run_config import PreferenceConfig
from megarl.preflight.plan_text import choice_text, epochs_text, evaluation_times, lengths_text
from megarl.types import RoleName


class RewardModelConfig(PreferenceConfig):
    """Training of the role reward on preferences."""

    roles: ClassVar[tuple[RoleName, ...]] = ("reward",)
    trained: ClassVar[tuple[RoleName, ...]] = ("reward",)
    trainer: ClassVar[str] = "megarl.stages.reward_model.trainer:RewardModelTrainer"

    stage: Literal["reward_model"]  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen)
    """Training of a reward model."""
    reward: RewardTraining
    """The reward model's training, such as reward: {optimizer: {lr: 1.0e-5}}."""
    normalisation: Normalisation | None = None
    """Scale the scores by reference samples; null does not. Needs rollout."""
    rollout: Rollout | None = None
    """Generation of the reference samples."""

    @property
    def engine_settings(self) -> Rollout | None:
        return self.rollout

    @property
    def shown_metrics(self) -> tuple[str, ...]:
        metrics = ("reward_model/loss", "reward_model/accuracy", "reward_model/lr", "reward_model/grad_norm")
        return (*metrics, "perf/tokens_per_second", "time/step")

    def new_head(self, role: RoleName) -> NewHead:
        return NewHead(std=self.reward.head_std, seed=self.reward.head_seed)

    def loss_spec(self, role: RoleName) -> LossSpec:
        return PreferenceSpec(stage=self.stage, loss=self.reward.loss)

    def read_sets(self, reader: Any) -> Any:
        from megarl.preflight.datasets import pair_sets

        return pair_sets(self.data, self.reward.loss, reader, self.normalisation, self.rollout)

    def plan_lines(self, rows: Mapping[str, str], count: int) -> Iterator[tuple[str, str]]:
        data = self.data
        size = data.pairs_per_step
        yield "data", f"{data.train.path}: {rows['data.train']}; {epochs_text(self.steps, size, count)}"
        units = "prompts with candidates" if self.reward.loss.name == "best_of_n" else "pairs"
        yield "step", f"{size} {units}, each response with its prompt up to {data.max_tokens} tokens"
        yield "loss", choice_text(self.reward.loss)
        if data.evaluation is not None:
            times = evaluation_times(data.evaluate_every)
            yield "evaluation", f"{data.evaluation.path}: {rows['data.evaluation']}; {times}"
        if self.normalisation is not None and self.rollout is not None:
            source = f"{self.normalisation.prompts.path}: {rows['normalisation.prompts']}"
            yield "normalisation", f"{self.normalisation.samples} answers to prompts of {source}"
            yield "lengths", lengths_text(self.rollout)


def reward_models_are_exported(reward: RewardTraining) -> Iterator[Broken]:
    """A reward model is exported as a whole, with the scale of its scores."""
    if reward.lora is not None and not reward.lora.merge:
        yield "reward.lora.merge", "true: the scale of scores belongs to a whole model", "set it to true"


def reference_samples_have_engines(normalisation: Normalisation | None, rollout: Rollout | None) -> Iterator[Broken]:
    """A reward model's run has engines for the reference samples of its normalisation, and for nothing else."""
    if normalisation is not None and rollout is None:
        fix = "add the section rollout, or set normalisation to null"
        yield "normalisation", "needs the section rollout", fix
    if normalisation is None and rollout is not None:
        fix = "add the section normalisation, or set rollout to null"
        yield "rollout", "has an effect with normalisation alone", fix
