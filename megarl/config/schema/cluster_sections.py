"""The devices of a run, the roles and engines on them, and the transfer of weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, cast

from pydantic import BeforeValidator, Field

from megarl.bounds import BelowOne, Count, Natural, Positive, Temperature
from megarl.config.schema.base import Devices, GroupName, Section, parse_devices, without_removed
from megarl.types import RoleName


class TimeLimits(Section):
    """How long a call of each phase may take, seconds; then the run ends and names the ranks without an answer."""

    start: Positive = 1800.0
    """Starting the processes, loading the models, connecting the ranks, ending the processes."""
    rollout: Positive = 3600.0
    """Generating a part of the responses of a step or of an evaluation; of conversations, between two turns."""
    scoring: Positive = 1800.0
    """Running the reward functions on the responses of a step."""
    inference: Positive = 1800.0
    """One role's forward pass over the responses of a step."""
    update: Positive = 3600.0
    """One role's optimizer steps of a step."""
    sync: Positive = 600.0
    """Moving the actor's weights into the engines, and verifying them."""
    checkpoint: Positive = 1800.0
    """Writing or reading one role's part of a checkpoint or of an export; verifying a checkpoint that is written."""

    @property
    def calls(self) -> float:
        """Limit of a step's reward calls: below ``scoring``, so that none ends the run."""
        return 0.9 * self.scoring

    @property
    def patience(self) -> float:
        """How long a rank waits for its peers, seconds: longer than any call, so that the driver ends the run first.

        The driver can name the rank that hangs; a waiting rank cannot.
        """
        return 2 * max(self.model_dump().values())


class Threads(Section):
    """Threads of each process with device cpu; a number, or auto, is short for both fields. Another number rounds sums
    differently. A resumed run keeps the numbers that null has got, on any machine."""

    trainers: Count | None = 1
    """Threads of each rank of a group; null divides the machine's cores among the ranks, and the engines' devices if
    rollout.max_staleness or rollout.inference_parts let both work at the same time."""
    engines: Count | None = 1
    """Threads of each device of an engine; null divides the cores likewise."""


def _thread_fields(value: object) -> object:
    """Returns the fields that a number or `auto` stands for."""
    if isinstance(value, Threads | Mapping):
        return cast(object, value)
    if value == "auto":
        return {"trainers": None, "engines": None}
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError("should be auto, a number from 1 on, or {trainers: ..., engines: ...}")
    return {"trainers": value, "engines": value}


class Cluster(Section):
    """The devices of the run, numbered over all nodes: the first one of node n is n * devices_per_node."""

    nodes: Count = 1
    """Nodes; with device cpu they are virtual, and only set the distance between devices."""
    devices_per_node: Count = 8
    """Devices of each node."""
    min_nodes: Count | None = None
    """Nodes that suffice for a restart after the loss of a node, with their devices; null: all.
    Needs address."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Kind of the devices: GPUs, or virtual slots of the CPU."""
    address: str | None = None
    """Address of a running Ray to join, such as 10.0.0.1:6379, or auto for the one that RAY_ADDRESS names; null starts
    one on this machine. Several nodes of GPUs need one to start; a plan does not."""
    peak_tflops: Positive | None = None
    """Peak of a device for the metrics of MFU, TFLOP/s; null takes the dense bfloat16 peak of known GPUs."""
    device_memory_gib: Positive | None = None
    """Memory of a GPU, or of all virtual devices together, of which memory plans and
    rollout.gpu_memory_fraction count parts, GiB; null takes this machine's."""
    object_store_mib: Annotated[int, Field(ge=80)] = 4096
    """Shared memory of each node for rollouts and experience, MiB."""
    threads_per_device: Annotated[Threads, BeforeValidator(_thread_fields)] = Threads()
    """Threads of each process with device cpu: a number, or auto, from the cores of this machine."""
    time_limits: TimeLimits = TimeLimits()
    """How long a call of each phase may take, seconds."""

    @property
    def is_here(self) -> bool:
        """Whether all devices are this machine's; the nodes of virtual ones are virtual."""
        return self.address is None and (self.nodes == 1 or self.device == "cpu")


Recompute = Literal["none", "selective", "full"]


class RoleConfig(Section):
    """How a role is split over its group; its data parallel size is devices / (tp * pp)."""

    tp: Count = 1
    """Tensor parallel size: ranks that share each matrix."""
    pp: Count = 1
    """Pipeline parallel size: stages."""
    vpp: Count = 1
    """Model chunks per pipeline stage; 1 is no interleaving."""
    ep: Count = 1
    """Expert parallel size: neighboring replicas that share the experts of each layer."""
    sequence_parallel: bool = False
    """Split the activations outside of the tensor-parallel regions along the sequence."""
    tokens_per_micro_batch: Count = 8192
    """Largest number of tokens (prompts and responses) of a packed micro-batch."""
    recompute: Recompute = "none"
    """Activations that the backward pass recomputes: none; selective, those of norms and MLPs, but of no mixture of
    experts; or full, those of whole layers."""
    offload: bool = False
    """Keep the role in host memory while others use its devices."""


class Group(Section):
    """Devices with one process each, and the roles that share these processes."""

    devices: Devices
    """Devices of the group, such as 0-3 or 0,1,4-5; groups are disjoint."""
    roles: Annotated[Mapping[RoleName, RoleConfig], BeforeValidator(without_removed)]
    """Roles of the group; null removes an inherited one."""


Groups = Annotated[Mapping[GroupName, Group], BeforeValidator(without_removed)]


_TIES = 64
"""Tokens beyond top-k that vLLM keeps on a CPU, as their logits are the last one's, and that are recorded."""


class Rollout(Section):
    """Generation with vLLM: one engine for every tp devices."""

    devices: Devices
    """Devices of the engines, such as 0-3; they may be shared with groups."""
    tp: Count = 1
    """Tensor parallel size of each engine."""
    temperature: Temperature = 1.0
    """Divides the logits, in the trainers too."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that together have this probability; 1 samples from all."""
    top_k: Count | None = None
    """Sample from this many likeliest tokens; null samples from all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Sample from the tokens with at least this part of the likeliest one's probability; 0 samples from all."""
    kept_max: Annotated[int, Field(ge=2, le=4096)] = 256
    """In stage ppo with top_p or min_p, the most tokens from which one may be sampled to be learned
    from: engines record them, and the trainers' log-probabilities are normalized over them. With
    top_k that is the bound."""
    speculative: Annotated[int, Field(ge=0, le=15)] = 0
    """Draft up to this many tokens per response and step: those that followed its last tokens where
    these occurred before. 0 drafts none. Faster where few responses at once repeat their prompt or
    themselves; docs/metrics.md has what it changes."""
    draft_model: str | None = None
    """Hugging Face directory of a small model with the model's tokenizer and vocabulary, which drafts
    these tokens, also where nothing is repeated."""
    router_replay: bool = True
    """Send tokens of the actor, in training too, and of its reference to the experts that the engines
    chose for them, which they record. It has no effect without experts, and in conversations.
    `policy/rerouted` says how often the trainer would have chosen otherwise."""
    min_new_tokens: Natural = 0
    """Least number of tokens of a response: no end token is sampled before. 0 in stage ppo."""
    max_new_tokens: Count
    """Largest number of tokens of a response."""
    ignore_eos: bool = False
    """Let the model's end tokens end no response: they are sampled like others, and all responses that nothing else
    ends have max_new_tokens."""
    stop: tuple[str, ...] = Field(default=(), strict=False)
    """Texts that end a response and stay in it. Needs a tokenizer."""
    stop_token_ids: tuple[Natural, ...] = Field(default=(), strict=False)
    """Token ids that end a response, besides the model's end tokens."""
    max_model_len: Count
    """Largest number of tokens of prompt and response together."""
    quantization: Literal["fp8_per_channel"] | None = None
    """Compute the engines' linear layers in float8, with a scale per output channel and per token; null does not."""
    kv_cache_mib: Count | None = None
    """Memory of the key-value cache of each engine rank, MiB. null: with gpu_memory_fraction, what that leaves; on a
    GPU, what the memory plan (docs/memory.md) leaves of it while the cache is there, but for 5 %, and at most
    the longest sequences that vLLM generates at once; with device cpu 4096."""
    gpu_memory_fraction: BelowOne | None = None
    """Part of a GPU's memory for an engine rank, weights included, instead of kv_cache_mib; with device cpu, of the
    machine's memory, or of cluster.device_memory_gib. The cache has what the memory plan
    (docs/memory.md) leaves of it: the same size at every start."""
    sleep: bool = False
    """Free the engines' weights and caches while the trainers work. Unset, it is true where groups
    have the engines' GPUs, except in stage eval and with sync_every above 1."""
    enforce_eager: bool = False
    """No compilation and no CUDA graphs: a quicker start, less memory, slower rollouts."""
    sync_every: Count = 1
    """Steps between transfers of the weights into the engines."""
    max_staleness: Natural = 0
    """Bound of the age of the weights that sample a step, versions; 0 samples and trains in turn.
    Above 0, engines on devices of their own sample ahead."""
    mode: Literal["exact", "bounded", "inflight"] = "exact"
    """Responses in progress when new weights are due: exact and bounded finish them first, inflight
    continues with the new weights. exact is repeatable: version t - 1 - max_staleness samples step
    t. With bounded the steps overlap, and long responses skip versions."""
    inference_parts: Count = 1
    """Parts of a step's samples: rewards and forward passes begin with a part while engines on
    devices of their own generate the others. Results depend on the number only by rounding, through
    packing."""
    inflight_cache: Literal["recompute", "keep"] = "recompute"
    """With mode inflight, the cache of responses in progress: prefilled again with new weights, or
    kept."""
    rolling_update: bool = False
    """With mode bounded or inflight, give new weights to half of the engines at a time; the others
    generate."""
    max_replacements: Natural = 0
    """Engines on devices of their own that the run may replace when they die or hang; others answer
    until the next sync. At 0 the run ends."""
    record: str | None = None
    """Directory for each step's rollouts."""
    replay: str | None = None
    """Directory of recorded rollouts, which replace the generation of their steps."""

    @property
    def truncates(self) -> bool:
        """Whether tokens are sampled from a part of all."""
        return self.top_p < 1 or self.top_k is not None or self.min_p > 0

    @property
    def most_kept(self) -> int:
        """The most tokens from which one may be sampled to be learned from."""
        return self.kept_max if self.top_k is None else self.top_k + _TIES

    @property
    def positions(self) -> int:
        """The most positions of a sequence: its tokens, one that scoring generates, and drafts.

        Where a sequence and its drafts have no room for other drafts, vLLM (0.32) drafts zeros for
        the whole batch: samples would depend on others.
        """
        return self.max_model_len + 1 + 2 * self.speculative

    @property
    def engines(self) -> int:
        """Number of engines."""
        return len(parse_devices(self.devices)) // self.tp


class LogprobAgreement(Section):
    """Trainer and engines must agree on log-probabilities after the first sync and a resume."""

    sequences: Count = 16
    """Random sequences that both score."""
    tokens: Annotated[int, Field(ge=2)] = 32
    """Largest number of tokens of each."""
    max_mean_abs_diff: Positive | None = None
    """Largest mean absolute difference, nats; null is 1e-4 for float32 and 0.05 for bfloat16."""


class Resharding(Section):
    """The transfer of the actor's weights into the engines."""

    bucket_mib: Positive = 256.0
    """Memory of a bucket, MiB. Ranks of engines receive into two, and trainers send from two where
    they cannot write there. Larger parameters come in parts."""
    verify: bool = True
    """Send a checksum with every message and check it."""
    transport: str = "auto"
    """Transport of messages; auto takes the fastest between two processes, gloo and shared_memory
    are for device cpu; or package.module:Class."""
    logprob_check: LogprobAgreement | None = LogprobAgreement()
    """The check of log-probabilities before training; null does not check."""
    adapters: Literal["merged", "separate"] = "merged"
    """What engines get of a model with actor.lora. merged: weights with the adapters in them, in each
    sync. separate: the weights once, and in each sync the adapters, which vLLM applies."""


def shared_devices(groups: Groups, rollout: Rollout) -> list[int]:
    """Returns the devices of the engines that groups have too."""
    trained_on = {device for group in groups.values() for device in parse_devices(group.devices)}
    return sorted(trained_on & set(parse_devices(rollout.devices)))
