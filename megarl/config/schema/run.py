"""What every stage's configuration has: the run, its model, its devices, what it keeps and tells."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megarl.config.devices import parse_devices
from megarl.config.schema.base import Count, Decay, Natural, NotNegative, Positive, Section, Seed
from megarl.config.schema.model import Model
from megarl.config.schema.placement import Cluster, Groups, RoleConfig
from megarl.types import Layout, RoleName


class Run(Section):
    """The run itself."""

    dir: str
    """Directory that the run writes."""
    seed: Seed = 0
    """Seed of sampling and of the order of the data."""


class TrainingRun(Run):
    """The run itself."""

    dir: str
    """Directory that the run writes; where it has a checkpoint already, training goes on from there."""
    steps: Count
    """Steps to take: a round of rollouts and its updates, of sft and reward_model an optimizer step."""


class Optimizer(Section):
    """Adam with decoupled weight decay."""

    adam: Literal["pytorch", "tensorflow"] = "pytorch"
    """Whether eps is added to the root of the second moment after its bias correction, or before."""
    lr: Positive
    """Learning rate, at its highest."""
    schedule: Literal["constant", "linear", "cosine", "anneal"] = "constant"
    """How the learning rate moves after the warm-up, until the run's last optimizer step. anneal is linear to 0 by the
    run's steps: the optimizer steps of one of them have one rate, the first step lr."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Part of the run's optimizer steps in which the learning rate rises linearly from 0."""
    final_lr: NotNegative = 0.0
    """Learning rate at the end of a linear or cosine schedule."""
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.95)
    """Decays of the running means of the gradient and of its square."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay, per unit of learning rate."""
    clip_grad: Positive | None = 1.0
    """Largest global gradient norm; null does not clip."""


class Actor(Section):
    """The policy's training."""

    optimizer: Optimizer
    """Optimizer of the actor."""


class EMA(Section):
    """An exponential moving average of the actor's weights, in float32, updated after every optimizer step."""

    decay: Decay = 0.992
    """What is kept of the average."""


class Policy(Actor):
    """The policy's training."""

    ema: EMA | None = None
    """Keep a moving average of the actor, export it too; null does not."""


class Checkpoint(Section):
    """What a run keeps to go on after an interruption."""

    every: Count | None = None
    """Steps between checkpoints; the last step makes one in any case. null: the last step alone."""
    keep: Count = 2
    """Checkpoints to keep; older ones are removed."""


class Tracking(Section):
    """Where the metrics go, besides metrics.jsonl and the console."""

    tensorboard: bool = True
    """Write TensorBoard events into the run's directory."""
    wandb_project: str | None = None
    """Project of Weights & Biases to log to; null does not. Needs the package wandb."""
    samples: Natural = 4
    """Samples of each step with rollouts and of each evaluation that samples.jsonl gets, with texts and scores."""


class RunConfig(Section):
    """What the configurations of all stages have in common."""

    trained: ClassVar[tuple[RoleName, ...]] = ()
    """Roles that the stage trains; their optimizers are in the sections of their names."""

    stage: Literal["sft", "reward_model", "ppo", "raft", "eval"]
    """What the run does."""
    run: Run
    """The run itself."""
    model: Model
    """The model."""
    cluster: Cluster = Cluster()
    """The devices of the run."""
    groups: Groups
    """Groups of devices by name, and the roles placed in each; null removes an inherited group."""
    tracking: Tracking = Tracking()
    """Where the metrics go."""

    def has_role(self, role: RoleName) -> bool:
        """Whether a group has the role."""
        return any(role in group.roles for group in self.groups.values())

    def group_of(self, role: RoleName) -> str:
        """The name of the group that has the role.

        Raises:
            KeyError: no group has it.
        """
        for name, group in self.groups.items():
            if role in group.roles:
                return name
        raise KeyError(role)

    def role(self, role: RoleName) -> RoleConfig:
        """The role's own settings."""
        return self.groups[self.group_of(role)].roles[role]

    def device_list(self, group: str) -> tuple[int, ...]:
        """The devices of a group, in the order of its ranks."""
        return parse_devices(self.groups[group].devices)

    def layout(self, role: RoleName) -> Layout:
        """How the role is split over its group; data parallelism is what tp and pp leave."""
        own = self.role(role)
        devices = len(self.device_list(self.group_of(role)))
        return Layout(
            tp=own.tp,
            pp=own.pp,
            dp=devices // (own.tp * own.pp),
            vpp=own.vpp,
            ep=own.ep,
            sequence_parallel=own.sequence_parallel,
        )


class TrainingConfig(RunConfig):
    """What the configurations of all stages have in common that train."""

    run: TrainingRun  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen)
    """The run itself."""
    checkpoint: Checkpoint = Checkpoint()
    """What the run keeps to go on after an interruption."""

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a trained role in a step of the run."""
        return 1

    @property
    def saved(self) -> tuple[RoleName, ...]:
        """The roles of the run that checkpoints have."""
        return tuple(role for role in self.trained if self.has_role(role))

    def optimizer_steps(self, role: RoleName) -> int:
        """Optimizer steps of a trained role in the whole run: the length of the learning rate's schedule."""
        del role
        return self.run.steps * self.updates_per_step

    def optimizer(self, role: RoleName) -> Optimizer:
        """The optimizer of a trained role."""
        return getattr(self, role).optimizer
