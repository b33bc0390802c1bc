"""Log-probabilities, entropies and the KL divergence from a reference, over a vocabulary that is split over TP.

The logits of a chunk of tokens exist only while the chunk is computed, forward and again backward,
so memory does not grow with the pack; fused, they exist as products in the model's dtype alone.
Megatron's vocab-parallel cross entropy reads the global parallel_state, keeps all logits, and
computes no entropy. The divergence equals ``algos.kl.full`` of whole logits.

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

from megarl.algos.kl import divergence_terms, log_mixture
from megarl.bounds import DivergenceForm


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
    fused: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns log softmax(hidden @ weight.T / temperature)[label] and the entropy of that distribution.

    Both are [T] nats, float32 (float64 where the hidden states are), and differentiable.

    Args:
        hidden: [T, H], equal on all TP ranks.
        weight: [rows, H], this rank's rows of the output layer.
        labels: [T] int64, ids over the whole vocabulary; or [T, K], each label and the other ids over
            which its distribution is, and -1 after them.
        chunk_tokens: tokens whose logits exist at a time.
        fused: whether Triton kernels compute it, in float32; not where the hidden states are float64,
            nor for [T, K] labels.
    """
    options = (shard, temperature, chunk_tokens, fused and hidden.dtype != torch.float64)
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
        statistics = _statistics
        if labels.ndim == 2:
            statistics = _kept_statistics
        elif fused:
            statistics = _fused_statistics
        for begin in range(0, len(hidden), chunk_tokens):
            part = slice(begin, begin + chunk_tokens)
            found = statistics(hidden[part], weight, labels[part], shard, temperature)
            logprobs[part], entropy[part], log_z[part] = found
        ctx.save_for_backward(hidden, weight, labels, log_z, entropy)
        ctx.options = options
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, log_z, entropy = ctx.saved_tensors
        shard, temperature, chunk_tokens, fused = ctx.options
        gradient = _gradient
        if labels.ndim == 2:
            gradient = _kept_gradient
        elif fused:
            gradient = _fused_gradient

        def logits_gradient(part: slice) -> Tensor:
            columns = log_z[part], entropy[part], grad_logprobs[part], grad_entropy[part]
            return gradient(hidden[part], weight, labels[part], shard, temperature, columns)

        gradients = linear_gradients(hidden, weight, shard, chunk_tokens, logits_gradient)
        return *gradients, None, None


def _statistics(
    hidden: Tensor, weight: Tensor, labels: Tensor, shard: VocabShard, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-probabilities, entropies and logarithms of the normalizers, [T]."""
    local, here = _local_labels(labels, shard)
    logits = shard_logits(hidden, weight, shard, temperature)
    top = _largest(logits, shard)
    sums = top.new_zeros(3, len(top))
    if shard.size:
        target = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1)
        exp = (logits - top.unsqueeze(-1)).exp_()
        total = exp.sum(-1)
        sums = torch.stack([total, exp.mul_(logits).sum(-1), target * here])
    over_shards(sums, shard)
    total, weighted, target = sums
    log_z = top + total.log()
    return target - log_z, log_z - weighted / total, log_z


def _fused_statistics(
    hidden: Tensor, weight: Tensor, labels: Tensor, shard: VocabShard, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same by the kernels. Sums are of logits below the top, so that entropies keep their digits."""
    from megarl.megatron.platform.logit_kernels import LOWEST, logit_statistics

    if shard.size:
        products = hidden @ weight[: shard.size].T
        top, total, weighted, target = logit_statistics(products, labels - shard.start, temperature)
    else:
        total, weighted, target = hidden.new_zeros(3, len(hidden), dtype=torch.float32)
        top = torch.full_like(total, LOWEST)
    highest = top.clone()
    over_shards(highest, shard, dist.ReduceOp.MAX)
    fall = top - highest
    keep = fall.exp()
    sums = torch.stack([keep * total, keep * (weighted + total * fall), target])
    over_shards(sums, shard)
    total, weighted, target = sums
    log_total = total.log()
    log_z = highest + log_total
    return target - log_z, log_total - weighted / total, log_z


Columns = tuple[Tensor, Tensor, Tensor, Tensor]
"""Logarithms of the normalizers, entropies, and the gradients of log-probabilities and entropies, [T]."""


def _gradient(
    hidden: Tensor, weight: Tensor, labels: Tensor, shard: VocabShard, temperature: float, columns: Columns
) -> Tensor:
    """Returns the gradient of the products, [T, size]."""
    local, here = _local_labels(labels, shard)
    log_z, entropy, logprob_slope, entropy_slope = (x.unsqueeze(-1) for x in columns)
    logits = shard_logits(hidden, weight, shard, temperature)
    log_p = logits.sub_(log_z)
    p = log_p.exp()
    # d logprob / d logits = onehot - p;   d entropy / d logits = -p (log p + entropy)
    entropy_part = log_p.add_(entropy).mul_(p).mul_(entropy_slope)
    grad = p.neg_().mul_(logprob_slope).sub_(entropy_part)
    if shard.size:
        grad.scatter_add_(-1, local.unsqueeze(-1), logprob_slope * here.unsqueeze(-1))
    return grad.div_(temperature)


def _fused_gradient(
    hidden: Tensor, weight: Tensor, labels: Tensor, shard: VocabShard, temperature: float, columns: Columns
) -> Tensor:
    """The same by the kernel, in place of the products."""
    from megarl.megatron.platform.logit_kernels import logit_gradient_

    products = hidden @ weight[: shard.size].T
    if not shard.size:
        return products
    return logit_gradient_(products, labels - shard.start, *columns, temperature)


def _kept_statistics(
    hidden: Tensor, weight: Tensor, kept: Tensor, shard: VocabShard, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same over kept ids, [T, K]: of the products, which are all made, only theirs are read."""
    logits, here, _ = _kept_logits(hidden, weight, kept, shard, temperature)
    top = logits.amax(-1)
    over_shards(top, shard, dist.ReduceOp.MAX)
    below = (logits - top.unsqueeze(-1)).where(here, 0.0)
    exp = below.exp() * here
    target = logits[:, 0].where(here[:, 0], 0.0)
    sums = torch.stack([exp.sum(-1), (exp * below).sum(-1), target])
    over_shards(sums, shard)
    total, weighted, target = sums
    log_total = total.log()
    log_z = top + log_total
    return target - log_z, log_total - weighted / total, log_z


def _kept_gradient(
    hidden: Tensor, weight: Tensor, kept: Tensor, shard: VocabShard, temperature: float, columns: Columns
) -> Tensor:
    """The same over kept ids, [T, K]; all others have no gradient."""
    logits, here, rows = _kept_logits(hidden, weight, kept, shard, temperature)
    log_z, entropy, logprob_slope, entropy_slope = (x.unsqueeze(-1) for x in columns)
    log_p = (logits - log_z).where(here, 0.0)
    slope = -log_p.exp() * (logprob_slope + (log_p + entropy) * entropy_slope)
    slope[:, :1] += logprob_slope
    gradient = weight.new_zeros(len(hidden), shard.size)
    if shard.size:
        slope = (slope * here).div_(temperature)
        # Ids of other shards add zeros.
        gradient.scatter_add_(-1, rows, slope.to(gradient.dtype))
    return gradient


def _kept_logits(
    hidden: Tensor, weight: Tensor, kept: Tensor, shard: VocabShard, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the logits of kept ids, -inf where another rank has them, where this one does, and their rows or 0.

    All are [T, K].
    """
    rows = kept.long() - shard.start
    here = (kept >= 0) & (rows >= 0) & (rows < shard.size)
    rows = rows.where(here, 0)
    if shard.size:
        products = hidden @ weight[: shard.size].T
        logits = products.gather(-1, rows).to(wide(hidden)).div_(temperature)
    else:
        logits = hidden.new_zeros(kept.shape, dtype=wide(hidden))
    return logits.masked_fill_(~here, -torch.inf), here, rows


def _largest(logits: Tensor, shard: VocabShard) -> Tensor:
    """Returns the largest logit of each token over all shards, [T]."""
    top = logits.max(-1).values if shard.size else logits.new_full((len(logits),), -torch.inf)
    over_shards(top, shard, dist.ReduceOp.MAX)
    return top


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
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of hidden states, summed over the shards, and of this rank's output weights.

    Frozen weights have none.

    Args:
        logits_gradient: gradient of ``hidden @ weight.T`` for a chunk of tokens, [tokens, size].
    """
    grad_hidden = torch.empty_like(hidden)
    grad_weight: Tensor | None = None
    if weight.requires_grad:
        grad_weight = torch.zeros_like(weight, dtype=wide(weight))  # so that chunks do not add up rounding
    for begin in range(0, len(hidden), chunk_tokens):
        part = slice(begin, begin + chunk_tokens)
        grad = logits_gradient(part).to(weight.dtype)
        grad_hidden[part] = grad @ weight[: shard.size]
        if grad_weight is not None:
            grad_weight[: shard.size] += grad.T @ hidden[part]
        del grad  # before the next chunk is made
    over_shards(grad_hidden, shard)
    if grad_weight is not None:
        grad_weight = grad_weight.to(weight.dtype)
    return grad_hidden, grad_weight


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
    form: DivergenceForm = "reverse",
    mix: float = 0.5,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
) -> Tensor:
    """Returns a divergence of the policy from the reference, [T] nats; see ``algos.kl.full``.

    p and q are softmax(hidden @ weight.T / temperature) of the policy and of the reference, which
    has no gradient. Shapes and dtypes are those of ``logprobs_and_entropy``.
    """
    options = (shard, temperature, chunk_tokens, form, mix)
    return _Divergence.apply(hidden, weight, ref_hidden, ref_weight, options)


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ref_hidden: Tensor,
        ref_weight: Tensor,
        options: tuple[VocabShard, float, int, DivergenceForm, float],
    ) -> Tensor:
        shard, temperature, chunk_tokens, form, mix = options
        result = torch.empty(len(hidden), dtype=wide(hidden), device=hidden.device)
        mean_slope = torch.empty_like(result)
        for begin in range(0, len(hidden), chunk_tokens):
            part = slice(begin, begin + chunk_tokens)
            log_p = _log_softmax(hidden[part], weight, shard, temperature)
            log_q = _log_softmax(ref_hidden[part], ref_weight, shard, temperature)
            result[part] = divergence_terms(log_p, log_q, form, mix).sum(-1)
            if form == "jsd":
                mean_slope[part] = (log_p.exp() * _slope(log_p, log_q, form, mix)).sum(-1)
        over_shards(result, shard)
        if form == "jsd":
            over_shards(mean_slope, shard)
        else:
            mean_slope = result
        ctx.save_for_backward(hidden, weight, ref_hidden, ref_weight, mean_slope)
        ctx.options = options
        return result

    @staticmethod
    def backward(ctx: Any, grad_result: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, ref_hidden, ref_weight, mean_slope = ctx.saved_tensors
        shard, temperature, chunk_tokens, form, mix = ctx.options

        def logits_gradient(part: slice) -> Tensor:
            log_p = _log_softmax(hidden[part], weight, shard, temperature)
            log_q = _log_softmax(ref_hidden[part], ref_weight, shard, temperature)
            if form == "forward":
                slope = log_p.exp() - log_q.exp()
            else:
                # p (d D / d p - the mean of d D / d p under p)
                slope = _slope(log_p, log_q, form, mix)
                slope = log_p.exp() * (slope - mean_slope[part].unsqueeze(-1))
            return slope * grad_result[part].unsqueeze(-1) / temperature

        gradients = linear_gradients(hidden, weight, shard, chunk_tokens, logits_gradient)
        return *gradients, None, None, None


def _slope(log_p: Tensor, log_q: Tensor, form: DivergenceForm, mix: float) -> Tensor:
    """Returns the derivative of a divergence by p, but for a constant."""
    if form == "reverse":
        return log_p - log_q
    return (1 - mix) * (log_p - log_mixture(log_p, log_q, mix))


def _log_softmax(hidden: Tensor, weight: Tensor, shard: VocabShard, temperature: float) -> Tensor:
    """Returns the log-probabilities of this rank's rows, normalized over all ranks, [T, size]."""
    logits = shard_logits(hidden, weight, shard, temperature)
    top = _largest(logits, shard)
    total = (logits - top.unsqueeze(-1)).exp().sum(-1)
    over_shards(total, shard)
    return logits - (top + total.log()).unsqueeze(-1)
