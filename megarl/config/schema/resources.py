"""The devices of a run, the roles and engines on them, and the transfer of weights between these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from megarl.bounds import Count, Natural, Positive
from megarl.config.schema.base import Devices, GroupName, Section, parse_devices, without_removed
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


class Rollout(Section):
    """Generation with vLLM: one engine for every tp devices."""

    devices: Devices
    """Devices of the engines; a group may have them too."""
    tp: Count = 1
    """Tensor parallel size of each engine."""
    temperature: Positive = 1.0
    """Divides the logits, in the trainers too."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that together have this probability; 1 is all."""
    top_k: Count | None = None
    """Sample from this many likeliest tokens; null is all."""
    min_new_tokens: Natural = 0
    """Tokens of a response before which no end token is sampled."""
    max_new_tokens: Count
    """Tokens of a response, at most."""
    stop: tuple[str, ...] = Field(default=(), strict=False)
    """Texts that end a response; the tokens that complete one stay in the response. Needs a tokenizer."""
    stop_token_ids: tuple[Natural, ...] = Field(default=(), strict=False)
    """Token ids that end a response, besides the model's end tokens."""
    max_model_len: Count
    """Tokens of prompt and response together, at most."""
    quantization: Literal["fp8_per_channel"] | None = None
    """Compute the engines' linear layers in float8: a scale per output channel and per token; null does not."""
    kv_cache_mib: Count = 4096
    """Memory of the key-value cache of each engine rank, MiB."""
    sleep: bool = False
    """Let the engines give up their weights and caches while the trainers work: needed where they share devices."""
    sync_every: Count = 1
    """Steps between transfers of the weights into the engines: rollouts are up to this many steps old, less one."""
    record: str | None = None
    """Directory to write each step's rollouts to."""
    replay: str | None = None
    """Directory of recorded rollouts: the steps that it has are trained on instead of generated."""

    @property
    def engines(self) -> int:
        """Engines that the devices hold."""
        return len(parse_devices(self.devices)) // self.tp


class LogprobGate(Section):
    """After the first sync and after a resume, trainer and engines must agree on the log-probabilities of a probe."""

    sequences: Count = 16
    """Random sequences that both score, teacher-forced."""
    tokens: Annotated[int, Field(ge=2)] = 32
    """Tokens of each, at most."""
    max_mean_abs_diff: Positive | None = None
    """Largest mean absolute difference, nats; null is 1e-4 for float32 and 0.05 for bfloat16."""


class Resharding(Section):
    """The transfer of the actor's weights into the engines."""

    bucket_mib: Positive = 256.0
    """Memory of a bucket, MiB. A rank of an engine receives into two, and a trainer's sends from two where it cannot
    write there. Larger parameters come in parts, which an engine puts together first where vLLM packs them."""
    verify: bool = True
    """Send and check a checksum with every message."""
    transport: Literal["auto", "gloo", "shared_memory"] = "auto"
    """How messages travel; auto takes the fastest way between each two processes, the others are for device cpu."""
    gate: LogprobGate | None = LogprobGate()
    """Agreement that a run must show before it trains; null does not look."""
