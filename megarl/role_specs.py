"""The roles of a run as its configuration specifies them: checkpoint, head, layout, optimizer, loss, average."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megarl.config import (
    PPOConfig,
    RewardModelConfig,
    RolloutTrainingConfig,
    RunConfig,
    SamplingConfig,
    TrainingConfig,
)
from megarl.config.schema import Algo, Choice, LayerChoice, Optimizer, ValueNorm
from megarl.types import Layout, RoleName

Recompute = Literal["none", "selective", "full"]
"""Activations that the backward pass recomputes: none, those of core attention, or of whole layers."""


@dataclass(frozen=True, kw_only=True)
class NewHead:
    """A value or score head with normally distributed weights, the same on every rank.

    Args:
        std: of the weights, or the rule for it; see ``algos.reward_shaping.head_std``.
    """

    std: float | Literal["inverse_sqrt", "inverse"]
    seed: int


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """PPO's loss of an actor.

    Args:
        temperature: of the rollouts.
        share, mix_share: factors of the policy loss and of the pretraining texts' loss.
        max_staleness: how much older than the actor's the weights may be that sampled a token.
        value_norm: of the critic, for the experience that the actor's ranks build; None without.
    """

    algo: Algo
    temperature: float
    share: float = 1.0
    mix_share: float = 0.0
    max_staleness: int = 0
    value_norm: ValueNorm | None = None


@dataclass(frozen=True, kw_only=True)
class ValueSpec:
    """PPO's loss of a critic."""

    algo: Algo


@dataclass(frozen=True, kw_only=True)
class TextSpec:
    """The negative log-likelihood of texts; ``stage`` is the prefix of its metrics."""

    stage: str


@dataclass(frozen=True, kw_only=True)
class PreferenceSpec:
    """A reward model's loss on preferences; ``stage`` is the prefix of its metrics."""

    stage: str
    loss: Choice


LossSpec = PolicySpec | ValueSpec | TextSpec | PreferenceSpec


@dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    """A role's training.

    Args:
        total_steps: optimizer steps of the run.
        steps_together: optimizer steps of one step of the run.
        ema_decay: of the average of the weights; None without one.
    """

    optimizer: Optimizer
    total_steps: int
    steps_together: int
    ema_decay: float | None
    loss: LossSpec


@dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """A role as its ranks build it.

    Args:
        checkpoint: Hugging Face directory; None is that of the run's model.
        new_head: in place of the checkpoint's.
        vocab_size: token ids in use; None is all of the model's.
        training: None for inference only.
        reference_weight: of the actor's weights in a soft update of this role; None without soft updates.
    """

    name: RoleName
    layout: Layout
    recompute: Recompute
    layers: LayerChoice
    offload: bool
    checkpoint: str | None
    new_head: NewHead | None
    vocab_size: int | None
    training: TrainingSpec | None
    reference_weight: float | None


def role_specs(config: RunConfig, group: str) -> dict[RoleName, RoleSpec]:
    return {name: _role_spec(config, name) for name in config.groups[group].roles}


def _role_spec(config: RunConfig, name: RoleName) -> RoleSpec:
    placed = config.role(name)
    sync = config.algo.kl.reference_sync if isinstance(config, PPOConfig) and name == "reference" else None
    return RoleSpec(
        name=name,
        layout=config.layout(name),
        recompute=placed.recompute,
        layers=config.model.layers,
        offload=placed.offload,
        checkpoint=_checkpoint(config, name),
        new_head=_new_head(config, name),
        vocab_size=config.model.vocab_size,
        training=_training(config, name) if isinstance(config, TrainingConfig) and name in config.trained else None,
        reference_weight=None if sync is None else sync.weight,
    )


def _checkpoint(config: RunConfig, name: RoleName) -> str | None:
    if name == "reward" and isinstance(config, SamplingConfig):
        return config.reward.path
    if name == "critic" and isinstance(config, PPOConfig) and config.critic is not None:
        return config.critic.path
    return None


def _new_head(config: RunConfig, name: RoleName) -> NewHead | None:
    if isinstance(config, RewardModelConfig) or (
        name == "reward" and isinstance(config, SamplingConfig) and config.reward.path is None
    ):
        return NewHead(std=config.reward.head_std, seed=config.reward.head_seed)
    if name == "critic" and isinstance(config, PPOConfig) and (critic := config.critic) and critic.head != "loaded":
        return NewHead(std=critic.head_std, seed=critic.head_seed)
    return None


def _training(config: TrainingConfig, name: RoleName) -> TrainingSpec:
    ema = config.actor.ema if name == "actor" and isinstance(config, RolloutTrainingConfig) else None
    return TrainingSpec(
        optimizer=config.optimizer(name),
        total_steps=config.optimizer_steps(name),
        steps_together=config.updates_per_step,
        ema_decay=None if ema is None else ema.decay,
        loss=_loss(config, name),
    )


def _loss(config: TrainingConfig, name: RoleName) -> LossSpec:
    if isinstance(config, RewardModelConfig):
        return PreferenceSpec(stage=config.stage, loss=config.reward.loss)
    if not isinstance(config, PPOConfig):
        return TextSpec(stage=config.stage)
    if name == "critic":
        return ValueSpec(algo=config.algo)
    share, mix_share = 1.0, 0.0
    if config.ptx is not None:
        from megarl.algos.optimization import ptx_shares  # imports torch, which a plan does without

        share, mix_share = ptx_shares(coef=config.ptx.coef, mode=config.ptx.mode)
    return PolicySpec(
        algo=config.algo,
        temperature=1.0 if config.algo.is_likelihood else config.rollout.temperature,
        share=share,
        mix_share=mix_share,
        max_staleness=config.rollout.max_staleness,
        value_norm=None if config.critic is None else config.critic.value_norm,
    )
