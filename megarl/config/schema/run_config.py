"""The base classes of the stages' configurations.

A stage is a subclass in `megarl.stages.NAME.config`. It declares its fields, and answers what
others ask of a stage: its roles, rows, losses, the lines of its plan, and the metrics that it
shows. Nobody else names a stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from typing import Any, ClassVar, Final

from megarl.config.schema.base import Section, parse_devices
from megarl.config.schema.cluster_sections import Cluster, Groups, Resharding, RoleConfig, Rollout
from megarl.config.schema.inputs import Model, PairData, PromptData, RowSettings, TextData
from megarl.config.schema.loss_specs import LossSpec, NewHead
from megarl.config.schema.scoring_sections import (
    EnvironmentSettings,
    Evaluation,
    JudgeModel,
    PeriodicEvaluation,
    Reward,
    RewardFunction,
)
from megarl.config.schema.training_sections import (
    PTX,
    CheckpointSettings,
    Critic,
    Health,
    LoRA,
    Optimizer,
    Policy,
    Profiling,
    Reference,
    Run,
    Tracking,
    TrainingRun,
)
from megarl.types import Layout, RoleName


@dataclass(frozen=True, kw_only=True)
class LargestBatches:
    """The largest passes of a run's roles.

    Args:
        tokens: largest number of tokens of a sequence, or of a preference's pair.
        inference: largest number of sequences of an inference pass.
        update: largest number of sequences of an optimizer step.
    """

    tokens: int
    inference: int
    update: int


class RunConfig(Section):
    """The fields of all stages."""

    roles: ClassVar[tuple[RoleName, ...]] = ()
    """Roles that the stage may have; of a stage that trains, the first one is required."""
    trained: ClassVar[tuple[RoleName, ...]] = ()
    """Roles that the stage trains; their optimizers are in the sections of their names."""
    rows_in: ClassVar[str] = "data"
    """The section whose settings decide how all rows are read."""
    rows_field: ClassVar[str] = "data.train"
    """The field of the training data."""
    exports_initial_architecture: ClassVar[bool] = False
    """Whether the exported model has the architecture of the initial model, for later plans."""

    stage: str
    """The kind of run."""
    run: Run
    """Directory and seed of the run, such as run: {dir: runs/mine}."""
    model: Model
    """The model, such as model: {path: models/mine}."""
    cluster: Cluster = Cluster()
    """The devices of the run."""
    groups: Groups
    """Groups of devices by name, and the roles in each, such as
    groups: {train: {devices: 0-3, roles: {actor: {tp: 2}}}}; null removes an inherited group. A run
    takes one device of this machine if it has no groups, no rollout.devices, and no nodes or
    devices in cluster."""
    tracking: Tracking = Tracking()
    """Where the metrics go."""

    @property
    def recorded_kept_max(self) -> int | None:
        """The most tokens, from which one was sampled, that engines record; None where nothing reads them."""
        return None

    @property
    def replays_routes(self) -> bool:
        """Whether tokens of the actor and its reference go to the experts that the engines chose."""
        return False

    @property
    def separate_adapters(self) -> LoRA | None:
        """The actor's adapters that engines apply; None where they get weights with the adapters in them."""
        return None

    @property
    def engine_settings(self) -> Rollout | None:
        """The settings of the run's engines; None without engines."""
        return None

    @property
    def judge_model(self) -> JudgeModel | None:
        """The model on engines of its own that judges responses; None without one."""
        return None

    @property
    def rows_section(self) -> tuple[str, RowSettings]:
        """The name of the section whose settings decide how all rows are read, and the section."""
        return self.rows_in, getattr(self, self.rows_in)

    @property
    def longest_sequence(self) -> int:
        """The most positions of a sequence that engines generate, or that is trained on where there are none."""
        if self.engine_settings is not None:
            return self.engine_settings.positions
        _, rows = self.rows_section
        assert isinstance(rows, TextData | PairData)
        return rows.max_tokens

    @property
    def largest_batches(self) -> LargestBatches:
        """The sizes from which the memory of a role's passes follows."""
        raise NotImplementedError

    @property
    def actor_has_adapters(self) -> bool:
        """Whether adapters of the actor are trained in place of its weights."""
        return False

    @classmethod
    def default_roles(cls, raw: Mapping[str, Any]) -> list[RoleName]:
        """Returns the roles of a plain configuration without groups, which need not be valid."""
        return list(cls.trained)

    def role_checkpoint(self, role: RoleName) -> str | None:
        """Returns the Hugging Face directory of a role; None for that of the run's model."""
        section = getattr(self, role, None)
        if isinstance(section, Critic | Reward | Reference):
            return section.path
        return None

    @property
    def teachers(self) -> Mapping[str, str]:
        """The directories of several teachers by name, all of the role reference; none for one."""
        return {}

    @property
    def teacher_column(self) -> str | None:
        """The column of a prompt's row with the name of its teacher; None for one teacher."""
        return None

    def new_head(self, role: RoleName) -> NewHead | None:
        """Returns the new head of a role; None if its checkpoint has the head."""
        return None

    @property
    def reference_weight(self) -> float | None:
        """The actor's weight in a soft update of the role reference; None without soft updates."""
        return None

    def read_sets(self, reader: Any) -> Any:
        """Reads the stage's rows with a `preflight.datasets.DataReader` into `Sets`."""
        raise NotImplementedError

    def plan_lines(self, rows: Mapping[str, str], count: int) -> Iterator[tuple[str, str]]:
        """Yields the lines of the run's plan that are the stage's, as (key, text).

        Args:
            rows: numbers of rows in words, by field.
            count: number of usable rows of the training data.
        """
        raise NotImplementedError

    def has_role(self, role: RoleName) -> bool:
        return any(role in group.roles for group in self.groups.values())

    def group_of(self, role: RoleName) -> str:
        """Returns the name of the role's group; raises KeyError if no group has it."""
        for name, group in self.groups.items():
            if role in group.roles:
                return name
        raise KeyError(role)

    def role(self, role: RoleName) -> RoleConfig:
        return self.groups[self.group_of(role)].roles[role]

    def device_list(self, group: str) -> tuple[int, ...]:
        """Returns the devices of a group, by rank."""
        return parse_devices(self.groups[group].devices)

    def layout(self, role: RoleName) -> Layout:
        """Returns how the role is split over its group, with dp = devices / (tp * pp)."""
        sizes = self.role(role)
        devices = len(self.device_list(self.group_of(role)))
        return Layout(
            tp=sizes.tp,
            pp=sizes.pp,
            dp=devices // (sizes.tp * sizes.pp),
            vpp=sizes.vpp,
            ep=sizes.ep,
            sequence_parallel=sizes.sequence_parallel,
        )


class TrainingConfig(RunConfig):
    """The fields of all stages that train."""

    trainer: ClassVar[str]
    """The class of the stage's trainer, as module:class; see `loop.train.Trainer`."""

    run: TrainingRun  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen)
    """Directory, seed and length of the run, such as run: {dir: runs/mine, steps: 100}."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """Checkpoints, from which the run resumes."""
    profile: Profiling | None = None
    """Steps with torch's profiler; null profiles none."""
    health: Health = Health()
    """The checks of the run's own metrics."""

    @property
    def steps(self) -> int:
        """Steps of the run, known when rows are read; see `preflight.epochs.with_steps`."""
        assert self.run.steps is not None
        return self.run.steps

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a trained role in one step of the run."""
        return 1

    @property
    def rows_per_step(self) -> int:
        """Rows of the training data in one step of the run."""
        raise NotImplementedError

    @property
    def shown_metrics(self) -> tuple[str, ...]:
        """The metrics that are shown of every step, in order; see `run.display.COLUMNS`."""
        raise NotImplementedError

    def loss_spec(self, role: RoleName) -> LossSpec:
        """Returns the loss of a trained role."""
        raise NotImplementedError

    def ema_decay(self, role: RoleName) -> float | None:
        """Returns the decay of the average of a trained role's weights; None without one."""
        return None

    @property
    def saved(self) -> tuple[RoleName, ...]:
        """The roles in checkpoints."""
        return tuple(role for role in self.trained if self.has_role(role))

    def optimizer_steps(self, role: RoleName) -> int:
        """Returns the optimizer steps of a trained role in the run."""
        return self.steps * self.updates_per_step

    def optimizer(self, role: RoleName) -> Optimizer:
        return getattr(self, role).optimizer

    def lora(self, role: RoleName) -> LoRA | None:
        """Returns the adapters of a role that are trained in place of its weights; None without any."""
        section = getattr(self, role, None) if role in self.trained else None
        return None if section is None else section.lora

    @property
    def actor_has_adapters(self) -> bool:
        return self.lora("actor") is not None

    def shares_base(self, role: RoleName) -> bool:
        """Returns whether a trained role has the actor's weights below its adapters."""
        section = getattr(self, role)
        return isinstance(section, Critic) and section.shares_base


class PreferenceConfig(TrainingConfig):
    """The fields of stages that train on preferences."""

    data: PairData
    """The preference pairs, such as data: {train: pairs.jsonl, max_tokens: 1024, pairs_per_step: 8}."""

    @property
    def rows_per_step(self) -> int:
        return self.data.pairs_per_step

    @property
    def largest_batches(self) -> LargestBatches:
        pairs = self.data.pairs_per_step
        return LargestBatches(tokens=2 * self.data.max_tokens, inference=pairs, update=pairs)


class SamplingConfig(RunConfig):
    """The fields of stages whose engines answer prompts that are then scored."""

    rollout: Rollout
    """Generation with vLLM, such as rollout: {max_new_tokens: 256, max_model_len: 1024}."""
    reward: Reward = Reward()
    """The score of a response."""
    environment: EnvironmentSettings | None = None
    """The environment of multi-turn rollouts; null: single-turn."""
    evaluation: Evaluation | None = None
    """Held-out prompts."""

    @property
    def engine_settings(self) -> Rollout:
        return self.rollout

    @property
    def scored_functions(self) -> tuple[RewardFunction, ...]:
        """The functions that score the rollouts of the stage itself."""
        return self.reward.functions

    @property
    def judge_model(self) -> JudgeModel | None:
        return self.reward.judge_model

    def new_head(self, role: RoleName) -> NewHead | None:
        if role == "reward" and self.reward.path is None:
            return NewHead(std=self.reward.head_std, seed=self.reward.head_seed)
        return None

    @property
    def sampled_prompts(self) -> PromptData | None:
        """The training's prompts; None without training."""
        return None

    @property
    def mixed_texts(self) -> PTX | None:
        """Texts that are mixed into the updates; None without any."""
        return None


class RolloutTrainingConfig(TrainingConfig, SamplingConfig):  # pyright: ignore[reportIncompatibleVariableOverride]
    """The fields of stages that train the actor on its own responses."""

    data: PromptData
    """The prompts, such as data: {prompts: prompts.jsonl, prompts_per_step: 8}."""
    actor: Policy
    """The policy's training, such as actor: {optimizer: {lr: 1.0e-6}}."""
    evaluation: PeriodicEvaluation | None = None  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen)
    """Held-out prompts."""
    resharding: Resharding = Resharding()
    """The transfer of weights into the engines."""

    rows_field: ClassVar[str] = "data.prompts"

    @property
    def separate_adapters(self) -> LoRA | None:
        return self.actor.lora if self.resharding.adapters == "separate" else None

    @property
    def rows_per_step(self) -> int:
        return self.data.prompts_per_step

    @property
    def sampled_prompts(self) -> PromptData:
        return self.data

    def ema_decay(self, role: RoleName) -> float | None:
        if role != "actor" or self.actor.ema is None:
            return None
        return self.actor.ema.decay


STAGES: Final[Mapping[str, str]] = {
    "sft": "megarl.stages.sft.config:SFTConfig",
    "dpo": "megarl.stages.dpo.config:DPOConfig",
    "reward_model": "megarl.stages.reward_model.config:RewardModelConfig",
    "ppo": "megarl.stages.ppo.config:PPOConfig",
    "eval": "megarl.stages.eval.config:EvalConfig",
}
"""The configuration of each stage, by the value of ``stage``, as module:class."""


@cache
def stage_class(stage: str) -> type[RunConfig]:
    """Returns the configuration of a stage; raises KeyError for an unknown one."""
    return resolve_name(STAGES[stage])


def raw_stage_class(raw: Mapping[str, Any]) -> type[RunConfig] | None:
    """Returns the class of the stage that unchecked fields name; None if missing or unknown."""
    stage = raw.get("stage")
    if isinstance(stage, str) and stage in STAGES:
        return stage_class(stage)
    return None


def trains(stage: str) -> bool:
    return issubclass(stage_class(stage), TrainingConfig)


def trains_on_rollouts(stage: str) -> bool:
    return issubclass(stage_class(stage), RolloutTrainingConfig)


def stage_classes() -> dict[str, type[RunConfig]]:
    """Returns the configurations of all stages, by the value of ``stage``."""
    return {stage: stage_class(stage) for stage in STAGES}
