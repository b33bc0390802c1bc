"""The roles of a group, built and filled as the configuration says: which checkpoint, which head, which loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megarl.algos.metrics import explained_variance
from megarl.algos.optimization import ptx_shares
from megarl.algos.reward_shaping import head_std
from megarl.config import EvalConfig, PPOConfig, RAFTConfig, RewardModelConfig, RunConfig
from megarl.data.packing import Chunks
from megarl.megatron.losses import policy_loss, text_loss, value_loss
from megarl.megatron.model_engine import Role, StepLoss
from megarl.megatron.parallel import GroupCache
from megarl.megatron.supervised_losses import preference_loss, sft_loss
from megarl.models import ModelSpec, model_spec
from megarl.types import RoleName
from megarl.weights.hf_files import load_shard, read_config


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
        average = config.actor.ema if name == "actor" and isinstance(config, PPOConfig | RAFTConfig) else None
        role.start_training(
            config.optimizer(name),
            config.optimizer_steps(name),
            together=config.updates_per_step,
            decay=None if average is None else average.decay,
        )
    return role


def loss_of(
    config: RunConfig, role: Role, chunks: Chunks[Any], *, kl_coef: float, reference: Role | None = None
) -> StepLoss:
    """What the stage trains a role with.

    Args:
        config: of the run.
        role: that is trained.
        chunks: what the loss reads, with the columns that the stage has.
        kl_coef: of a penalty in the loss, per nat.
        reference: where the process has one that the loss asks; see ``losses.policy_loss``.
    """
    if isinstance(config, PPOConfig):
        if role.head == "lm":
            return policy_loss(
                role,
                config.algo,
                chunks,
                temperature=config.rollout.temperature,
                kl_coef=kl_coef,
                share=_shares(config)[0],
                reference=reference,
            )
        return value_loss(role, config.algo, chunks)
    if isinstance(config, RewardModelConfig):
        return preference_loss(role, config.reward.loss, chunks)
    return sft_loss(role)


def text_loss_of(config: RunConfig, role: Role) -> StepLoss:
    """What an actor learns of the texts that its optimizer steps take along."""
    assert isinstance(config, PPOConfig)
    _, share = _shares(config)
    return text_loss(role, share=share)


def _shares(config: PPOConfig) -> tuple[float, float]:
    """Of the policy's loss and of the texts' in the whole."""
    return (1.0, 0.0) if config.ptx is None else ptx_shares(coef=config.ptx.coef, mode=config.ptx.mode)


_LOSSES = {"loss": "loss/total", "policy_loss": "policy/loss", "kl_loss": "loss/kl", "ptx_loss": "loss/ptx"}
"""What an actor's update in PPO tells of the parts of its loss."""


def told(config: RunConfig, name: RoleName, step: Mapping[str, float]) -> dict[str, float]:
    """What an optimizer step of a role tells, under the names of metrics."""
    if not isinstance(config, PPOConfig):
        return {f"{config.stage}/{metric}": value for metric, value in step.items()}
    if name == "actor":
        return {_LOSSES.get(metric, f"policy/{metric}"): value for metric, value in step.items()}
    values = {f"value/{metric}": value for metric, value in step.items()}
    if "error" not in step:  # no response of the mini-batch has a score
        return values
    return {**values, "value/explained_variance_after": explained_variance(step["error"], step["returns_var"])}


def _directory(config: RunConfig, name: RoleName) -> str | None:
    """The checkpoint that a role has of its own."""
    if name == "reward" and isinstance(config, PPOConfig | RAFTConfig | EvalConfig):
        return config.reward.path
    if name == "critic" and isinstance(config, PPOConfig) and config.critic is not None:
        return config.critic.path
    return None


def _new_head(config: RunConfig, name: RoleName, spec: ModelSpec) -> torch.Tensor | None:
    """The [1, hidden] head of a role that does not find one in its checkpoint; the same on every rank.

    A reward model that is trained starts as ``algos.scores.head_std`` says.
    """
    if isinstance(config, RewardModelConfig):
        std, seed = head_std(spec.dims.hidden, rule=config.reward.head_std), config.reward.head_seed
    elif isinstance(config, PPOConfig) and name == "critic" and config.critic is not None:
        if config.critic.head == "loaded":
            return None
        std, seed = config.critic.head_std, config.critic.head_seed
    elif name == "reward" and isinstance(config, PPOConfig | RAFTConfig | EvalConfig) and config.reward.path is None:
        std, seed = config.reward.head_std, config.reward.head_seed
    else:
        return None
    return std * torch.randn(1, spec.dims.hidden, generator=torch.Generator().manual_seed(seed))
