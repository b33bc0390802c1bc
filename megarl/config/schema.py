"""Every field of a run, typed and described. Frozen; unknown keys are refused; nothing is coerced.

Rules that hold within one field stand here; rules between fields are in ``megarl.config.rules``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from megarl.config.devices import parse_devices
from megarl.types import Layout, RoleName


def _device_text(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _checked_devices(text: str) -> str:
    parse_devices(text)
    return text


def _without_removed(value: object) -> object:
    """Drops the entries that an override set to null."""
    if not isinstance(value, Mapping):
        return value
    return {key: entry for key, entry in cast(Mapping[object, object], value).items() if entry is not None}


Devices = Annotated[str, BeforeValidator(_device_text), AfterValidator(_checked_devices)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
GroupName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")]


class Section(BaseModel):
    """The manners that all parts of a configuration share."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Run(Section):
    """The run itself."""

    dir: str
    """Directory that the run writes: metrics, the resolved configuration, the random model if there is one."""
    steps: Count
    """PPO steps to take; a step is one round of rollouts and its updates."""
    seed: Seed = 0
    """Seed of sampling and of the order of samples in updates."""


class RandomModel(Section):
    """A randomly initialised model instead of a checkpoint, for trials without one."""

    config: Mapping[str, Any]
    """Fields of the model's Hugging Face configuration; model_type chooses the architecture."""
    seed: Seed = 0
    """Seed of the weights."""


class Model(Section):
    """The model that is trained; the reference starts as its copy, the critic and the reward from its body."""

    path: str | None = None
    """Directory of a Hugging Face checkpoint (config.json and safetensors)."""
    random: RandomModel | None = None
    """Make a random model instead; exactly one of path and random is given."""
    vocab_size: Count | None = None
    """Token ids in use: those from this number on are never sampled and have no probability; null uses all."""

    def hf_config(self) -> Mapping[str, Any]:
        """The model's Hugging Face configuration, read from its directory where it has one."""
        return self.random.config if self.random is not None else read_hf_config(self.path or "")


class Cluster(Section):
    """The devices of the run. Device numbers count over the nodes: node n has n * devices_per_node onwards."""

    nodes: Count = 1
    """Nodes; with device cpu they are virtual, and only tell near from far."""
    devices_per_node: Count = 8
    """Devices of each node."""
    device: Literal["cuda", "cpu"] = "cuda"
    """What a device is: a GPU, or a virtual slot of the CPU."""
    address: str | None = None
    """Address of a running Ray to join, such as 10.0.0.1:6379; null starts one on this machine."""
    object_store_mib: Annotated[int, Field(ge=80)] = 4096
    """Shared memory of each node for rollouts and experience, MiB."""


class RoleConfig(Section):
    """How a role is split over its group; its data parallelism is what tp and pp leave of the devices."""

    tp: Count = 1
    """Tensor parallel size: ranks that share each matrix."""
    pp: Count = 1
    """Pipeline parallel size: stages."""
    vpp: Count = 1
    """Model chunks per pipeline stage; 1 is no interleaving."""
    sequence_parallel: bool = False
    """Split the activations between the tensor-parallel regions along the sequence."""
    tokens_per_micro_batch: Count = 8192
    """Tokens (prompt and response) that one packed micro-batch may hold."""


class Group(Section):
    """Devices with one process each, and the roles that take turns in these processes."""

    devices: Devices
    """Devices of the group, such as 0-3 or 0,1,4-5; no other group may have them."""
    roles: Annotated[Mapping[RoleName, RoleConfig], BeforeValidator(_without_removed)]
    """Roles of the group; null removes an inherited one."""


Groups = Annotated[Mapping[GroupName, Group], BeforeValidator(_without_removed)]


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
    max_new_tokens: Count
    """Tokens of a response, at most."""
    max_model_len: Count
    """Tokens of prompt and response together, at most."""
    kv_cache_mib: Count = 4096
    """Memory of the key-value cache of each engine rank, MiB."""
    record: str | None = None
    """Directory to write each step's rollouts to."""
    replay: str | None = None
    """Directory of recorded rollouts: the steps that it has are trained on instead of generated."""

    @property
    def engines(self) -> int:
        """Engines that the devices hold."""
        return len(parse_devices(self.devices)) // self.tp


class RandomPrompts(Section):
    """Prompts of random tokens, for trials without a data set."""

    count: Count
    """Prompts in the set."""
    min_tokens: Count
    """Tokens of a prompt, at least."""
    max_tokens: Count
    """Tokens of a prompt, at most."""
    seed: Seed = 0
    """Seed of the tokens."""


class Data(Section):
    """The prompts, and how many make a step."""

    prompts: str | None = None
    """JSONL file, a prompt per line: token_ids (a list), and prompt_id (unique; without it the line number)."""
    random: RandomPrompts | None = None
    """Make random prompts instead; exactly one of prompts and random is given."""
    prompts_per_step: Count
    """Prompts that are answered in a step."""
    samples_per_prompt: Count = 1
    """Answers to each prompt."""


class KL(Section):
    """The penalty for moving away from the reference."""

    model_config = ConfigDict(validate_by_alias=True, serialize_by_alias=True)

    placement: Literal["reward"] = Field(default="reward", alias="in")
    """Where the penalty acts: reward subtracts it from the reward of each token."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Per-token estimate, nats: k1 the difference of the log-probabilities, k2 half its square, k3 never negative."""
    coef: NotNegative = 0.0
    """Weight of the penalty, reward per nat; 0 is none, and needs no reference."""


class Algo(Section):
    """PPO: each of a step's mini_batches equal parts makes one optimizer step, ppo_epochs times over."""

    advantage: Literal["gae"] = "gae"
    """Advantage estimator: generalised advantage estimation, with a critic."""
    gamma: Fraction = 1.0
    """Discount per token."""
    lam: Fraction = 0.95
    """Decay of the advantage estimation per token; 1 is Monte Carlo, 0 one-step."""
    whiten_advantages: bool = True
    """Shift and scale the advantages of a step to mean 0 and variance 1 over its response tokens."""
    policy_loss: Literal["clip"] = "clip"
    """Policy loss: the clipped surrogate."""
    clip: Positive = 0.2
    """Half width of the probability ratio's interval around 1."""
    value_clip: Positive | None = 0.2
    """Half width of the interval in which a value may move in one step; null does not clip."""
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus, loss per nat."""
    kl: KL = KL()
    """The penalty for moving away from the reference."""
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """How token losses make the loss: the mean over the response tokens of an optimizer step, or over its responses."""
    score_clip: Positive | None = None
    """Scores are clipped to plus and minus this; null does not clip."""
    missing_end_score: float | None = None
    """Score of a response that the length limit ended; null leaves the reward model's."""
    ppo_epochs: Count = 1
    """Passes over a step's samples."""
    mini_batches: Count = 1
    """Optimizer steps in a pass; divides prompts_per_step * samples_per_prompt."""


class Optimizer(Section):
    """Adam with decoupled weight decay, at a constant learning rate."""

    lr: Positive
    """Learning rate."""
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.95)
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


class Critic(Section):
    """The value function's training; its body starts as the model's."""

    optimizer: Optimizer
    """Optimizer of the critic."""
    head_std: NotNegative = 0.0
    """Standard deviation of the value head's initial weights; 0 starts with all values at 0."""
    head_seed: Seed = 0
    """Seed of the value head's initial weights."""


class Reward(Section):
    """The reward model."""

    path: str | None = None
    """Directory of a Hugging Face checkpoint with a score head; null: the model's body with a random head."""
    head_std: Positive = 0.02
    """Standard deviation of the random head's weights."""
    head_seed: Seed = 0
    """Seed of the random head's weights."""


class Resharding(Section):
    """The transfer of the actor's weights into the engines after each step."""

    bucket_mib: Positive = 256.0
    """Largest message, MiB. A process keeps two; an engine one and its largest parameter, where that is larger."""
    verify: bool = True
    """Send and check a checksum with every message."""


class RunConfig(Section):
    """A whole run."""

    run: Run
    """The run itself."""
    model: Model
    """The model that is trained."""
    cluster: Cluster = Cluster()
    """The devices of the run."""
    groups: Groups
    """Groups of devices by name, and the roles placed in each; null removes an inherited group."""
    rollout: Rollout
    """Generation with vLLM."""
    data: Data
    """The prompts."""
    algo: Algo = Algo()
    """The algorithm."""
    actor: Actor
    """The policy's training."""
    critic: Critic
    """The value function's training."""
    reward: Reward = Reward()
    """The reward model."""
    resharding: Resharding = Resharding()
    """The transfer of weights into the engines."""

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
            sequence_parallel=own.sequence_parallel,
        )


def read_hf_config(path: str) -> Mapping[str, Any]:
    """The config.json of a Hugging Face checkpoint directory.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a JSON object.
    """
    fields = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    if not isinstance(fields, dict):
        raise ValueError(f"{path}/config.json is not a JSON object")
    return cast(dict[str, Any], fields)
