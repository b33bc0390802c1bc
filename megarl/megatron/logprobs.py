"""Log-probabilities, entropies and the KL divergence from a reference, over a vocabulary that is split over TP.

The logits of a chunk of tokens exist only while the chunk is computed, forward and again backward,
so memory does not grow with the pack. Megatron's vocab-parallel cross entropy reads the global
parallel_state, keeps all logits, and computes no entropy. The divergence equals ``algos.kl.full``
of whole logits.

Every function is collective over the TP group, forward and backward, and the gradient of the hidden
states is the whole one on every rank. Shape legend: T tokens, H hidden, rows of the local output
layer, size of them that are real.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.megatron.platform.kernels import compiled, is_compiled


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """The rows of the output layer on one TP rank.

    Args:
        start: vocabulary id of the first row.
        size: real rows; the rows after them pad the vocabulary.
    """

    group: dist.ProcessGroup
    start: int
    size: int


def vocab_shard(group: dist.ProcessGroup, rows: int, vocab_size: int) -> VocabShard:
    """Returns the shard of this rank, whose output layer has ``rows`` with padding, as many as on every rank."""
    start = group.rank() * rows
    return VocabShard(group=group, start=start, size=max(0, min(rows, vocab_size - start)))


def logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    shard: VocabShard,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    fused: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns log softmax(hidden @ weight.T / temperature)[label] and the entropy of that distribution.

    Both are [T] nats, float32 (float64 where the hidden states are), and differentiable.

    Args:
        hidden: [T, H], equal on all TP ranks.
        weight: [rows, H], this rank's rows of the output layer.
        labels: [T] int64, ids over the whole vocabulary.
        chunk_tokens: tokens whose logits exist at a time.
        fused: whether compiled kernels compute it; None: as ``platform.kernels`` has it.
    """
    if fused is None:
        fused = is_compiled("logprobs", hidden.device.type)
    options = (shard, temperature, chunk_tokens, fused and shard.size > 0)
    return _VocabParallelLogprobs.apply(hidden, weight, labels, options)


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        options: tuple[VocabShard, float, int, bool],
    ) -> tuple[Tensor, Tensor]:
        shard, temperature, chunk_tokens, fused = options
        logprobs = torch.empty(len(hidden), dtype=wide(hidden), device=hidden.device)
        entropy = torch.empty_like(logprobs)
        log_z = torch.empty_like(logprobs)
        for begin in range(0, len(hidden), chunk_tokens):
            part = slice(begin, begin + chunk_tokens)
            top, sums = _sums(hidden[part], weight, labels[part], shard, temperature, fused)
            total, weighted_total, target = sums
            log_z[part] = top + total.log()
            logprobs[part] = target - log_z[part]
            entropy[part] = log_z[part] - weighted_total / total
        ctx.save_for_backward(hidden, weight, labels, log_z, entropy)
        ctx.options = options
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, log_z, entropy = ctx.saved_tensors
        shard, temperature, chunk_tokens, fused = ctx.options

        def logits_gradient(part: slice) -> Tensor:
            local, here = _local_labels(labels[part], shard)
            columns = log_z[part], entropy[part], grad_logprobs[part], grad_entropy[part]
            if fused:
                products = hidden[part] @ weight[: shard.size].T
                gradient = compiled(gradient_of_products)
                return gradient(products, local, here, *columns, temperature=temperature)
            log_z_of, entropy_of, logprob_slope, entropy_slope = (x.unsqueeze(-1) for x in columns)
            logits = shard_logits(hidden[part], weight, shard, temperature)
            log_p = logits.sub_(log_z_of)
            p = log_p.exp()
            # d logprob / d logits = onehot - p;   d entropy / d logits = -p (log p + entropy)
            entropy_part = log_p.add_(entropy_of).mul_(p).mul_(entropy_slope)
            grad = p.neg_().mul_(logprob_slope).sub_(entropy_part)
            if shard.size:
                grad.scatter_add_(-1, local.unsqueeze(-1), logprob_slope * here.unsqueeze(-1))
            return grad.div_(temperature)

        gradients = linear_gradients(hidden, weight, shard, chunk_tokens, logits_gradient)
        return *gradients, None, None


def _sums(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    shard: VocabShard,
    temperature: float,
    fused: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the largest logits and the ``sums_of_products``, [T] and [3, T], over all shards.

    The fused kernels read the products and write no logits.
    """
    local, here = _local_labels(labels, shard)
    if fused:
        products = hidden @ weight[: shard.size].T
        top = compiled(top_of_products)(products, temperature)
        over_shards(top, shard, dist.ReduceOp.MAX)
        sums = compiled(sums_of_products)(products, top, local, here, temperature)
    else:
        logits = shard_logits(hidden, weight, shard, temperature)
        top = _largest(logits, shard)
        sums = top.new_zeros(3, len(top))
        if shard.size:
            sums = sums_of_products(logits, top, local, here)
    over_shards(sums, shard)
    return top, sums


def _largest(logits: Tensor, shard: VocabShard) -> Tensor:
    """Returns the largest logit of each token over all shards, [T]."""
    top = logits.max(-1).values if shard.size else logits.new_full((len(logits),), -torch.inf)
    over_shards(top, shard, dist.ReduceOp.MAX)
    return top


def top_of_products(products: Tensor, temperature: float) -> Tensor:
    """Returns the largest logit of each token."""
    return (products.to(wide(products)) / temperature).amax(-1)


def sums_of_products(
    products: Tensor, top: Tensor, local: Tensor, here: Tensor, temperature: float | None = None
) -> Tensor:
    """Returns sum exp(logit - top), the same times the logit, and the label's logit or 0, [3, T].

    Without a temperature, the products are the logits.
    """
    logits = products
    target = products.gather(-1, local.unsqueeze(-1)).squeeze(-1)
    if temperature is not None:
        logits = products.to(wide(products)) / temperature
        target = target.to(top.dtype) / temperature
    exp = (logits - top.unsqueeze(-1)).exp_()
    total = exp.sum(-1)
    return torch.stack([total, exp.mul_(logits).sum(-1), target * here])


def gradient_of_products(
    products: Tensor,
    local: Tensor,
    here: Tensor,
    log_z: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor,
    temperature: float,
) -> Tensor:
    """Returns the gradient of the products, [T, size], in their dtype, by the formulas of ``backward``."""
    log_p = products.to(wide(products)) / temperature - log_z.unsqueeze(-1)
    ids = torch.arange(products.shape[-1], device=products.device)
    label = (ids == local.unsqueeze(-1)) * (grad_logprobs * here).unsqueeze(-1)
    entropy_part = (log_p + entropy.unsqueeze(-1)) * grad_entropy.unsqueeze(-1)
    grad = label - log_p.exp() * (grad_logprobs.unsqueeze(-1) + entropy_part)
    return (grad / temperature).to(products.dtype)


def over_shards(tensor: Tensor, shard: VocabShard, op: Any = dist.ReduceOp.SUM) -> None:
    """Reduces in place over the TP ranks."""
    if shard.group.size() > 1:
        dist.all_reduce(tensor, op, group=shard.group)


def shard_logits(hidden: Tensor, weight: Tensor, shard: VocabShard, temperature: float) -> Tensor:
    """Returns the logits of the real rows, [T, size], in float32 or better."""
    return (hidden @ weight[: shard.size].T).to(wide(hidden)).div_(temperature)


def linear_gradients(
    hidden: Tensor,
    weight: Tensor,
    shard: VocabShard,
    chunk_tokens: int,
    logits_gradient: Callable[[slice], Tensor],
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of hidden states, summed over the shards, and of this rank's output weights.

    Args:
        logits_gradient: gradient of ``hidden @ weight.T`` for a chunk of tokens, [tokens, size].
    """
    grad_hidden = torch.empty_like(hidden)
    grad_weight = torch.zeros_like(weight, dtype=wide(weight))  # so that chunks do not add up rounding
    for begin in range(0, len(hidden), chunk_tokens):
        part = slice(begin, begin + chunk_tokens)
        grad = logits_gradient(part).to(weight.dtype)
        grad_hidden[part] = grad @ weight[: shard.size]
        grad_weight[: shard.size] += grad.T @ hidden[part]
    over_shards(grad_hidden, shard)
    return grad_hidden, grad_weight.to(weight.dtype)


def wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _local_labels(labels: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Returns the local row of each label, [T], 0 on other ranks, and [T] float 1 where this rank has it."""
    local = labels - shard.start
    here = (local >= 0) & (local < shard.size)
    return local.where(here, torch.zeros_like(local)), here.float()


def divergence(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    shard: VocabShard,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
) -> Tensor:
    """Returns KL(p || q) = sum over the vocabulary of p * (log p - log q), [T] nats.

    p and q are softmax(hidden @ weight.T / temperature) of the policy and of the reference, which
    has no gradient. Shapes and dtypes are those of ``logprobs_and_entropy``.
    """
    return _Divergence.apply(hidden, weight, ref_hidden, ref_weight, (shard, temperature, chunk_tokens))


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ref_hidden: Tensor,
        ref_weight: Tensor,
        options: tuple[VocabShard, float, int],
    ) -> Tensor:
        shard, temperature, chunk_tokens = options
        result = torch.empty(len(hidden), dtype=wide(hidden), device=hidden.device)
        for begin in range(0, len(hidden), chunk_tokens):
            part = slice(begin, begin + chunk_tokens)
            log_p = _log_softmax(hidden[part], weight, shard, temperature)
            log_q = _log_softmax(ref_hidden[part], ref_weight, shard, temperature)
            result[part] = (log_p.exp() * (log_p - log_q)).sum(-1)
        over_shards(result, shard)
        ctx.save_for_backward(hidden, weight, ref_hidden, ref_weight, result)
        ctx.options = options
        return result

    @staticmethod
    def backward(ctx: Any, grad_result: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, ref_hidden, ref_weight, result = ctx.saved_tensors
        shard, temperature, chunk_tokens = ctx.options

        def logits_gradient(part: slice) -> Tensor:
            log_p = _log_softmax(hidden[part], weight, shard, temperature)
            log_q = _log_softmax(ref_hidden[part], ref_weight, shard, temperature)
            # d KL / d logits = p (log p - log q - KL)
            slope = log_p.exp() * (log_p - log_q - result[part].unsqueeze(-1))
            return slope * grad_result[part].unsqueeze(-1) / temperature

        gradients = linear_gradients(hidden, weight, shard, chunk_tokens, logits_gradient)
        return *gradients, None, None, None


def _log_softmax(hidden: Tensor, weight: Tensor, shard: VocabShard, temperature: float) -> Tensor:
    """Returns the log-probabilities of this rank's rows, normalized over all ranks, [T, size]."""
    logits = shard_logits(hidden, weight, shard, temperature)
    top = _largest(logits, shard)
    total = (logits - top.unsqueeze(-1)).exp().sum(-1)
    over_shards(total, shard)
    return logits - (top + total.log()).unsqueeze(-1)
