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
    """Directory that the run writes; where it has a checkpoint already, the run goes on from there."""
    steps: Count
    """Steps to take: of PPO a round of rollouts and its updates, of the other stages an optimizer step."""
    seed: Seed = 0
    """Seed of sampling and of the order of the data."""


class Optimizer(Section):
    """Adam with decoupled weight decay."""

    lr: Positive
    """Learning rate, at its highest."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate moves after the warm-up, until the run's last optimizer step."""
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
    """Samples of each step and each evaluation of PPO that samples.jsonl gets, with their texts and scores."""


class RunConfig(Section):
    """What the configurations of all stages have in common."""

    trained: ClassVar[tuple[RoleName, ...]] = ()
    """Roles that the stage trains; their optimizers are in the sections of their names."""

    stage: Literal["sft", "reward_model", "ppo"]
    """What the run does."""
    run: Run
    """The run itself."""
    model: Model
    """The model that is trained."""
    cluster: Cluster = Cluster()
    """The devices of the run."""
    groups: Groups
    """Groups of devices by name, and the roles placed in each; null removes an inherited group."""
    checkpoint: Checkpoint = Checkpoint()
    """What the run keeps to go on after an interruption."""
    tracking: Tracking = Tracking()
    """Where the metrics go."""

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of each trained role in the whole run: the length of the learning rate's schedule."""
        return self.run.steps

    def optimizer(self, role: RoleName) -> Optimizer:
        """The optimizer of a trained role."""
        return getattr(self, role).optimizer

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
