"""The roles of a run as its configuration specifies them: checkpoint, head, layout, optimizer, loss, average."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config import RunConfig, TrainingConfig
from megarl.config.schema import LayerChoice, Optimizer
from megarl.config.schema.cluster_sections import Recompute
from megarl.config.schema.loss_specs import LossSpec, NewHead
from megarl.types import Layout, RoleName


@dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    """A role's training.

    Args:
        total_steps: optimizer steps of the run.
        steps_together: optimizer steps of one step of the run.
        ema_decay: decay of the average of the weights; None without one.
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
        checkpoint: Hugging Face directory; None: that of the run's model.
        new_head: head in place of the checkpoint's.
        vocab_size: number of token ids in use; None: all of the model's.
        training: settings of the training; None for inference only.
        reference_weight: weight of the actor in a soft update of this role; None
            without soft updates.
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
    training: TrainingSpec | None = None
    if isinstance(config, TrainingConfig) and name in config.trained:
        training = TrainingSpec(
            optimizer=config.optimizer(name),
            total_steps=config.optimizer_steps(name),
            steps_together=config.updates_per_step,
            ema_decay=config.ema_decay(name),
            loss=config.loss_spec(name),
        )
    return RoleSpec(
        name=name,
        layout=config.layout(name),
        recompute=placed.recompute,
        layers=config.model.layers,
        offload=placed.offload,
        checkpoint=config.role_checkpoint(name),
        new_head=config.new_head(name),
        vocab_size=config.model.vocab_size,
        training=training,
        reference_weight=config.reference_weight if name == "reference" else None,
    )
