"""Heads: from the hidden states of a micro-batch to a number per response token or per row.

Shape legend: S positions of the pack, H hidden, T response tokens of all rows (flat), B rows.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from megarl.megatron.logprobs import divergence, logprobs_and_entropy, vocab_shard
from megarl.megatron.model import RoleModel, ScalarHead
from megarl.megatron.pipeline import MicroBatch


def response_logprobs(
    model: RoleModel, batch: MicroBatch, hidden: torch.Tensor, *, vocab_size: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each response token and entropy of its distribution, [T] float32 nats each.

    Args:
        hidden: [S, 1, H], or this rank's part of S under sequence parallelism.
        vocab_size: without padding.
    """
    assert batch.batch is not None
    weight = model.chunks[-1].output_weight()
    shard = vocab_shard(model.groups.tp, len(weight), vocab_size)
    chosen = response_states(model, batch, hidden)
    labels = torch.from_numpy(batch.batch.labels).to(hidden.device)
    return logprobs_and_entropy(chosen, weight, labels, shard, temperature=temperature)


def response_states(model: RoleModel, batch: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
    """[T, H]: the hidden states that predict each response token."""
    assert batch.batch is not None
    return _at(model, hidden, batch.batch.source_positions)


def response_divergence(
    model: RoleModel,
    batch: MicroBatch,
    hidden: torch.Tensor,
    reference: RoleModel,
    ref_states: torch.Tensor,
    *,
    vocab_size: int,
    temperature: float,
) -> torch.Tensor:
    """[T] float32 nats: KL(policy || reference) of the distribution of each response token.

    Args:
        hidden: as for response_logprobs.
        reference: a model of the same layout.
        ref_states: [T, H], its response_states of the same rows.
    """
    weight, ref_weight = (of.chunks[-1].output_weight() for of in (model, reference))
    shard = vocab_shard(model.groups.tp, len(weight), vocab_size)
    states = response_states(model, batch, hidden)
    return divergence(states, weight, ref_states, ref_weight, shard, temperature=temperature)


def response_values(model: RoleModel, batch: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
    """[T] float32: the critic's value of the state before each response token."""
    assert batch.batch is not None
    return _scalar_head(model)(_at(model, hidden, batch.batch.source_positions))


def row_scores(model: RoleModel, batch: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
    """[B] float32: the reward model's score at the last token of each row."""
    assert batch.batch is not None
    return _scalar_head(model)(_at(model, hidden, batch.batch.last_positions))


def token_scores(model: RoleModel, batch: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
    """[T] float32: the reward model's score after each response token; the last of a row is that of ``row_scores``."""
    assert batch.batch is not None
    return _scalar_head(model)(_at(model, hidden, batch.batch.source_positions + 1))


def _scalar_head(model: RoleModel) -> ScalarHead:
    head = model.chunks[-1].output_layer
    assert isinstance(head, ScalarHead), "this role has an LM head"
    return head


def _at(model: RoleModel, hidden: torch.Tensor, positions: object) -> torch.Tensor:
    """[positions, H]. The heads give every TP rank the whole gradient, so the backward of the gather only splits it."""
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=model.groups.tp)
    return hidden.squeeze(1).index_select(0, torch.as_tensor(positions, device=hidden.device))
