"""The devices of a run, and which role runs where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from megarl.config.schema.base import Count, Devices, GroupName, Positive, Section, without_removed
from megarl.types import RoleName


class TimeLimits(Section):
    """How long a call of each phase may take before the run ends with the ranks that have not answered, seconds."""

    start: Positive = 1800.0
    """Starting the processes, loading the models, connecting the ranks; ending them."""
    rollout: Positive = 3600.0
    """Generating the responses of a step, or of an evaluation."""
    scoring: Positive = 1800.0
    """Running the reward functions on the responses of a step."""
    inference: Positive = 1800.0
    """One role's pass over the responses of a step, without training."""
    update: Positive = 3600.0
    """One role's optimizer steps of a step."""
    sync: Positive = 600.0
    """Moving the actor's weights into the engines, and looking whether they arrived."""
    checkpoint: Positive = 1800.0
    """Writing or reading one role's part of a checkpoint, or of an export."""

    @property
    def calls(self) -> float:
        """What the calls of a step's reward functions may take together: a run must not end because one is slow."""
        return 0.9 * self.scoring

    @property
    def patience(self) -> float:
        """How long a rank waits for its peers, seconds: longer than any call may take.

        Whoever waits does not know who hangs. The driver does: it is to end the run first.
        """
        return 2 * max(self.model_dump().values())


class Cluster(Section):
    """The devices of the run. Device numbers count over the nodes: node n has n * devices_per_node onwards."""

    nodes: Count = 1
    """Nodes; with device cpu they are virtual, and only tell near from far."""
    devices_per_node: Count = 8
    """Devices of each node."""
    device: Literal["cuda", "cpu"] = "cuda"
    """What a device is: a GPU, or a virtual slot of the CPU."""
    address: str | None = None
    """Address of a running Ray to join, such as 10.0.0.1:6379, or auto, which is the one that RAY_ADDRESS names; null
    starts one on this machine."""
    object_store_mib: Annotated[int, Field(ge=80)] = 4096
    """Shared memory of each node for rollouts and experience, MiB."""
    time_limits: TimeLimits = TimeLimits()
    """How long a call of each phase may take, seconds."""


class RoleConfig(Section):
    """How a role is split over its group; its data parallelism is what tp and pp leave of the devices."""

    tp: Count = 1
    """Tensor parallel size: ranks that share each matrix."""
    pp: Count = 1
    """Pipeline parallel size: stages."""
    vpp: Count = 1
    """Model chunks per pipeline stage; 1 is no interleaving."""
    ep: Count = 1
    """Expert parallel size: neighbouring replicas that share the experts of each layer of a mixture of experts."""
    sequence_parallel: bool = False
    """Split the activations between the tensor-parallel regions along the sequence."""
    tokens_per_micro_batch: Count = 8192
    """Tokens (prompt and response) that one packed micro-batch may hold."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that training computes again on the way back: none, those of attention, or those of whole layers."""
    offload: bool = False
    """Keep the role in host memory while it is not at work: its devices are free for the others."""


class Group(Section):
    """Devices with one process each, and the roles that take turns in these processes."""

    devices: Devices
    """Devices of the group, such as 0-3 or 0,1,4-5; no other group may have them."""
    roles: Annotated[Mapping[RoleName, RoleConfig], BeforeValidator(without_removed)]
    """Roles of the group; null removes an inherited one."""


Groups = Annotated[Mapping[GroupName, Group], BeforeValidator(without_removed)]
