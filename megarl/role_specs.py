"""The roles of a run as its configuration specifies them: checkpoint, head, layout, optimizer, loss, average."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config import RunConfig, TrainingConfig
from megarl.config.rules.model_rules import ids_in_use
from megarl.config.schema import LayerChoice, LoRA, Optimizer
from megarl.config.schema.cluster_sections import Recompute
from megarl.config.schema.loss_specs import LossSpec, NewHead, PolicySpec
from megarl.models.lora import Adapters
from megarl.types import Layout, RoleName


@dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    """A role's training.

    Args:
        total_steps: optimizer steps of the run.
        steps_together: optimizer steps of one step of the run.
        ema_decay: decay of the average of the weights; None without one.
        lora: adapters, which are trained in place of the weights.
        shares_base: whether the weights below the adapters are the actor's, in memory once.
    """

    optimizer: Optimizer
    total_steps: int
    steps_together: int
    ema_decay: float | None
    loss: LossSpec
    lora: LoRA | None = None
    shares_base: bool = False


@dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """A role as its ranks build it.

    Args:
        checkpoint: Hugging Face directory; None: that of the run's model.
        new_head: head in place of the checkpoint's.
        fused: whether its passes use fused kernels, those of ``megatron.platform.kernels``.
        vocab_size: number of token ids in use; None: all of the model's.
        longest: most positions of a sequence in the run.
        training: settings of the training; None for inference only.
        replays_routes: whether tokens go to the experts that engines have chosen.
        is_base: whether the role is the actor without its adapters, and has no model of its own.
        reference_weight: weight of the actor in a soft update of this role; None
            without soft updates.
    """

    name: RoleName
    layout: Layout
    recompute: Recompute
    layers: LayerChoice
    fused: bool
    offload: bool
    checkpoint: str | None
    new_head: NewHead | None
    vocab_size: int | None
    longest: int
    training: TrainingSpec | None
    reference_weight: float | None
    replays_routes: bool = False
    is_base: bool = False

    @property
    def is_frozen(self) -> bool:
        """Whether the role's weights never change."""
        return self.training is None and self.reference_weight is None

    @property
    def lora(self) -> LoRA | None:
        """The adapters that are trained in place of the weights."""
        return None if self.training is None else self.training.lora

    @property
    def reads_distributions(self) -> bool:
        """Whether the reference computes distributions during the role's updates."""
        return self.divergence is not None

    @property
    def divergence(self) -> str | None:
        """The form of the divergence from the reference's distributions; None where no update reads them."""
        if self.training is None or not isinstance(self.training.loss, PolicySpec):
            return None
        kl = self.training.loss.algo.kl
        return kl.estimator.options["form"] if kl.reads_distributions else None


def logit_chunk(fused: bool) -> int:
    """Returns the tokens whose logits a head computes at a time.

    Their products fill a GPU's multiprocessors in whole waves, where they are all that is kept; op
    by op, several copies in float32 are kept.
    """
    if fused:
        return 4096
    return 1024


def uses_fused_kernels(config: RunConfig) -> bool:
    """Returns whether the passes of trainers use fused kernels."""
    return config.cluster.device == "cuda" and config.model.kernels == "auto"


def adapters_of(lora: LoRA) -> Adapters:
    """Returns the adapters of a configuration."""
    targets = None if lora.targets == "all-linear" else lora.targets
    return Adapters(rank=lora.rank, scale=lora.scale, targets=targets)


def role_specs(config: RunConfig, group: str) -> dict[str, RoleSpec]:
    """Returns the models of a group by role; those of several teachers by `teacher_key`."""
    specs: dict[str, RoleSpec] = {}
    for name in config.groups[group].roles:
        teachers = config.teachers if name == "reference" else {}
        for teacher, path in teachers.items():
            specs[teacher_key(teacher)] = _role_spec(config, name, path)
        if not teachers:
            specs[name] = _role_spec(config, name, config.role_checkpoint(name))
    return specs


def teacher_key(name: str) -> str:
    """Returns what stands for one of several teachers in place of the role."""
    return f"reference.{name}"


def _computes_as_engines(name: RoleName, checkpoint: str | None) -> bool:
    """Whether a role has the engines' experts: the actor, and what it was, which the KL compares with it."""
    return name == "actor" or (name == "reference" and checkpoint is None)


def _role_spec(config: RunConfig, name: RoleName, checkpoint: str | None) -> RoleSpec:
    placed = config.role(name)
    vocab_size = config.model.vocab_size
    if name == "reference" and checkpoint is not None:
        vocab_size = ids_in_use(config.model)  # its distribution is over the actor's ids
    lora = config.lora(name) if isinstance(config, TrainingConfig) else None
    is_base = name == "reference" and checkpoint is None and config.actor_has_adapters
    training: TrainingSpec | None = None
    if isinstance(config, TrainingConfig) and name in config.trained:
        training = TrainingSpec(
            optimizer=config.optimizer(name),
            total_steps=config.optimizer_steps(name),
            steps_together=config.updates_per_step,
            ema_decay=config.ema_decay(name),
            loss=config.loss_spec(name),
            lora=lora,
            shares_base=config.shares_base(name),
        )
    return RoleSpec(
        name=name,
        layout=config.layout(name),
        recompute=placed.recompute,
        layers="local" if lora is not None or is_base else config.model.layers,
        fused=uses_fused_kernels(config),
        offload=placed.offload,
        checkpoint=checkpoint,
        new_head=config.new_head(name),
        vocab_size=vocab_size,
        longest=config.longest_sequence,
        training=training,
        reference_weight=config.reference_weight if name == "reference" else None,
        replays_routes=config.replays_routes and _computes_as_engines(name, checkpoint),
        is_base=is_base,
    )
