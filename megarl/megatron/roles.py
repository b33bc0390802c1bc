"""The roles of a group, built and filled as the configuration says: which checkpoint, which head, which loss."""

from __future__ import annotations

import math
from typing import Any

import torch

from megarl.config import PPOConfig, RewardModelConfig, RunConfig
from megarl.data.packing import Chunks
from megarl.megatron.groups import GroupCache
from megarl.megatron.losses import policy_loss, value_loss
from megarl.megatron.role import Role, StepLoss
from megarl.megatron.supervised_losses import preference_loss, sft_loss
from megarl.types import RoleName
from megarl.weights.files import load_shard, read_config
from megarl.weights.specs import ModelSpec, model_spec


def load_role(config: RunConfig, name: RoleName, rank: int, cache: GroupCache, model_dir: str) -> Role:
    """A role with its weights, on this rank: its own shards and no more; in training where the stage trains it.

    Args:
        config: of the run.
        name: of the role.
        rank: in the group.
        cache: of the group's process groups.
        model_dir: Hugging Face directory of the run's model.
    """
    directory = _directory(config, name) or model_dir
    spec = model_spec(read_config(directory))
    role = Role(
        name,
        spec,
        config.layout(name),
        rank,
        cache,
        vocab_size=config.model.vocab_size or spec.dims.vocab,
        dtype=getattr(torch, spec.dtype),
        trainable=name in config.trained,
        recompute=config.role(name).recompute,
    )
    head = _new_head(config, name, spec)
    tensors = load_shard(role.shard_map, directory, spec.manifest(role.head, new_head=head is not None))
    for parameter in role.shard_map.params.keys() - tensors.keys():
        assert head is not None, f"{name}: {parameter} was not read"
        tensors[parameter] = head
    role.load(tensors)
    if name in config.trained:
        role.start_training(config.optimizer(name), config.optimizer_steps)
    return role


def loss_of(config: RunConfig, role: Role, chunks: Chunks[Any], *, kl_coef: float) -> StepLoss:
    """What the stage trains a role with.

    Args:
        config: of the run.
        role: that is trained.
        chunks: what the loss reads, with the columns that the stage has.
        kl_coef: of a penalty in the loss, per nat.
    """
    if isinstance(config, PPOConfig):
        if role.head == "lm":
            temperature = config.rollout.temperature
            return policy_loss(role, config.algo, chunks, temperature=temperature, kl_coef=kl_coef)
        return value_loss(role, config.algo, chunks)
    if isinstance(config, RewardModelConfig):
        return preference_loss(role, config.reward.centering)
    return sft_loss(role)


def metric_prefix(config: RunConfig, name: RoleName) -> str:
    """Of what an update or an evaluation of a role tells."""
    return {"actor": "policy", "critic": "value"}[name] if isinstance(config, PPOConfig) else config.stage


def _directory(config: RunConfig, name: RoleName) -> str | None:
    """The checkpoint that a role has of its own."""
    if isinstance(config, PPOConfig):
        if name == "reward":
            return config.reward.path
        if name == "critic" and config.critic is not None:
            return config.critic.path
    return None


def _new_head(config: RunConfig, name: RoleName, spec: ModelSpec) -> torch.Tensor | None:
    """The [1, hidden] head of a role that does not find one in its checkpoint; the same on every rank.

    A reward model that is trained starts with N(0, 1 / sqrt(hidden + 1)), as in Ziegler et al. (2019).
    """
    if isinstance(config, RewardModelConfig):
        std, seed = 1 / math.sqrt(spec.dims.hidden + 1), config.reward.head_seed
    elif isinstance(config, PPOConfig) and name == "critic" and config.critic is not None:
        std, seed = config.critic.head_std, config.critic.head_seed
    elif isinstance(config, PPOConfig) and name == "reward" and config.reward.path is None:
        std, seed = config.reward.head_std, config.reward.head_seed
    else:
        return None
    return std * torch.randn(1, spec.dims.hidden, generator=torch.Generator().manual_seed(seed))
