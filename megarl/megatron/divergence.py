"""The KL divergence from a reference at each token, a chunk of tokens at a time, over a vocabulary split over TP.

What ``algos.kl.full`` is of whole logits. As in ``logprobs``, the logits of a chunk live only while the chunk is
computed, forward and again backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megarl.megatron.logprobs import VocabShard, linear_gradients, over_shards, shard_logits, wide


def divergence(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ref_hidden: torch.Tensor,
    ref_weight: torch.Tensor,
    shard: VocabShard,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
) -> torch.Tensor:
    """sum over the vocabulary of p * (log p - log q), p and q = softmax(hidden @ weight.T / temperature) of each model.

    Collective over the TP group, forward and backward. The gradient of ``hidden`` is the whole one on every rank; the
    reference has none.

    Args:
        hidden, ref_hidden: [T, H], equal on all TP ranks; of the policy and of the reference.
        weight, ref_weight: [rows, H], this rank's rows of the output layers.
        shard: which rows these are.
        temperature: of the sampling distribution.
        chunk_tokens: tokens whose logits exist at a time.

    Returns:
        [T] nats, float32 (float64 where the hidden states are).
    """
    return _Divergence.apply(hidden, weight, ref_hidden, ref_weight, shard, temperature, chunk_tokens)


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        ref_hidden: torch.Tensor,
        ref_weight: torch.Tensor,
        shard: VocabShard,
        temperature: float,
        chunk_tokens: int,
    ) -> torch.Tensor:
        result = torch.empty(len(hidden), dtype=wide(hidden), device=hidden.device)
        for begin in range(0, len(hidden), chunk_tokens):
            part = slice(begin, begin + chunk_tokens)
            log_p = _log_softmax(hidden[part], weight, shard, temperature)
            log_q = _log_softmax(ref_hidden[part], ref_weight, shard, temperature)
            result[part] = (log_p.exp() * (log_p - log_q)).sum(-1)
        over_shards(result, shard)
        ctx.save_for_backward(hidden, weight, ref_hidden, ref_weight, result)
        ctx.shard, ctx.temperature, ctx.chunk_tokens = shard, temperature, chunk_tokens
        return result

    @staticmethod
    def backward(ctx: Any, grad_result: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, ref_hidden, ref_weight, result = ctx.saved_tensors
        shard: VocabShard = ctx.shard

        def of_logits(part: slice) -> torch.Tensor:
            log_p = _log_softmax(hidden[part], weight, shard, ctx.temperature)
            log_q = _log_softmax(ref_hidden[part], ref_weight, shard, ctx.temperature)
            # d KL / d logits = p (log p - log q - KL)
            slope = log_p.exp() * (log_p - log_q - result[part].unsqueeze(-1))
            return slope * grad_result[part].unsqueeze(-1) / ctx.temperature

        return *linear_gradients(hidden, weight, shard, ctx.chunk_tokens, of_logits), None, None, None, None, None


def _log_softmax(hidden: torch.Tensor, weight: torch.Tensor, shard: VocabShard, temperature: float) -> torch.Tensor:
    """[T, size]: of this rank's rows, normalised over all ranks'."""
    logits = shard_logits(hidden, weight, shard, temperature)
    top = logits.max(-1).values if shard.size else logits.new_full((len(hidden),), -torch.inf)
    over_shards(top, shard, dist.ReduceOp.MAX)
    total = (logits - top.unsqueeze(-1)).exp().sum(-1)
    over_shards(total, shard)
    return logits - (top + total.log()).unsqueeze(-1)
