"""Heads: from the hidden states of a micro-batch to a number per response token or per row.

Shape legend: S positions of the pack, H hidden, T response tokens of all rows (flat), B rows.
Hidden states are [S, 1, H], or this rank's part of S under sequence parallelism.
"""

from __future__ import annotations

from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megarl.megatron.logprobs import logprobs_and_entropy, vocab_shard
from megarl.megatron.model import RoleModel, ScalarHead
from megarl.megatron.pipeline import MicroBatch
from megarl.role_specs import logit_chunk


def response_logprobs(
    model: RoleModel,
    batch: MicroBatch,
    hidden: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Returns each response token's log-probability and the entropy of its distribution, [T] float32 nats.

    The distribution is over the ids from which the token was sampled, where they are recorded.
    """
    weight = model.chunks[-1].output_weight()
    shard = vocab_shard(model.groups.tp, len(weight), model.vocab_size)
    states = response_states(model, batch, hidden)
    return logprobs_and_entropy(
        states,
        weight,
        batch.on_device.get("kept", batch.on_device["labels"]),
        shard,
        temperature=temperature,
        chunk_tokens=logit_chunk(model.fused),
        fused=model.fused,
    )


def response_states(model: RoleModel, batch: MicroBatch, hidden: Tensor) -> Tensor:
    """Returns the hidden states that predict each response token, [T, H]."""
    return _at(model, hidden, batch.on_device["source_positions"])


def response_values(model: RoleModel, batch: MicroBatch, hidden: Tensor) -> Tensor:
    """Returns the critic's value of the state before each response token, [T] float32."""
    return _scalars(model, hidden, batch.on_device["source_positions"])


def row_scores(model: RoleModel, batch: MicroBatch, hidden: Tensor) -> Tensor:
    """Returns the reward model's score at the last token of each row, [B] float32."""
    return _scalars(model, hidden, batch.on_device["last_positions"])


def token_scores(model: RoleModel, batch: MicroBatch, hidden: Tensor) -> Tensor:
    """Returns the reward model's score after each response token, [T] float32."""
    return _scalars(model, hidden, batch.on_device["source_positions"] + 1)


def _scalars(model: RoleModel, hidden: Tensor, positions: Tensor) -> Tensor:
    head = model.chunks[-1].output_layer
    assert isinstance(head, ScalarHead), "this role has an LM head"
    return head(_at(model, hidden, positions))


def _at(model: RoleModel, hidden: Tensor, positions: Tensor) -> Tensor:
    """[positions, H], at positions on the device."""
    if model.config.sequence_parallel:
        # The heads give every TP rank the whole gradient, so the backward only splits it.
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=model.groups.tp)
    return hidden.squeeze(1).index_select(0, positions)
