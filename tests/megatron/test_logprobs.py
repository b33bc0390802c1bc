"""Vocab-parallel log-probabilities and entropy against torch's own softmax on the whole vocabulary, with gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.pool import RankPool

VOCAB, HIDDEN, TOKENS = 37, 8, 11


def _case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    labels = torch.randint(VOCAB, (TOKENS,), generator=generator)
    return hidden, weight, labels, torch.randn(TOKENS, generator=generator), torch.randn(TOKENS, generator=generator)


def _sharded(rank: int, rows: int, temperature: float, chunk_tokens: int, fused: bool) -> tuple[torch.Tensor, ...]:
    import torch.distributed as dist

    from megarl.megatron import logprobs as module
    from megarl.megatron.logprobs import logprobs_and_entropy, vocab_shard

    hidden, weight, labels, grad_logprobs, grad_entropy = _case()
    shard = vocab_shard(dist.group.WORLD, rows, VOCAB)
    local = torch.full((rows, HIDDEN), 50.0)  # padding that would dominate, were it counted
    local[: shard.size] = weight[shard.start : shard.start + shard.size]
    hidden.requires_grad_()
    local.requires_grad_()
    with patch.object(module, "compiled", lambda function: function):  # test_kernels compiles
        logprobs, entropy = logprobs_and_entropy(
            hidden, local, labels, shard, temperature=temperature, chunk_tokens=chunk_tokens, fused=fused
        )
        torch.autograd.backward([logprobs, entropy], [grad_logprobs, grad_entropy])
    return logprobs.detach(), entropy.detach(), hidden.grad, local.grad


# Rows per rank with padding at the end; in the last case one rank holds nothing but padding.
@pytest.mark.dist
@pytest.mark.parametrize(("world_size", "rows"), [(1, 64), (2, 19), (4, 10), (4, 16)])
@pytest.mark.parametrize(
    ("temperature", "chunk_tokens", "fused"), [(1.0, 1024, False), (0.7, 4, False), (0.7, 4, True)]
)
def test_logprobs_equal_softmax_over_the_whole_vocabulary(
    pool: RankPool, world_size: int, rows: int, temperature: float, chunk_tokens: int, fused: bool
) -> None:
    hidden, weight, labels, grad_logprobs, grad_entropy = _case()
    hidden.requires_grad_()
    weight.requires_grad_()
    log_p = torch.log_softmax(hidden @ weight.T / temperature, dim=-1)
    logprobs = log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    entropy = torch.distributions.Categorical(logits=log_p).entropy()
    torch.autograd.backward([logprobs, entropy], [grad_logprobs, grad_entropy])

    results = pool.run(_sharded, rows, temperature, chunk_tokens, fused, world_size=world_size)
    weight_grad = torch.cat([result[3] for result in results])
    for got_logprobs, got_entropy, hidden_grad, _ in results:
        torch.testing.assert_close(got_logprobs, logprobs.detach(), rtol=0, atol=2e-6)
        torch.testing.assert_close(got_entropy, entropy.detach(), rtol=0, atol=2e-6)
        torch.testing.assert_close(hidden_grad, hidden.grad, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(weight_grad[:VOCAB], weight.grad, rtol=1e-5, atol=2e-6)
    assert not weight_grad[VOCAB:].any(), "padding rows must not get a gradient"


def _weight_gradient(rank: int, chunk_tokens: int) -> torch.Tensor:
    import torch.distributed as dist

    from megarl.megatron.logprobs import logprobs_and_entropy, vocab_shard

    hidden, weight, labels, grad = _long_case()
    hidden, weight = hidden.bfloat16(), weight.bfloat16().requires_grad_()
    shard = vocab_shard(dist.group.WORLD, VOCAB, VOCAB)
    logprobs, _ = logprobs_and_entropy(hidden, weight, labels, shard, chunk_tokens=chunk_tokens)
    logprobs.backward(grad)
    return weight.grad


def _long_case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(4096, HIDDEN, generator=generator).bfloat16().float()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).bfloat16().float()
    return hidden, weight, torch.randint(VOCAB, (4096,), generator=generator), torch.full((4096,), 1 / 4096)


@pytest.mark.dist
def test_chunked_bfloat16_gradients_accumulate_no_rounding(pool: RankPool) -> None:
    hidden, weight, labels, grad = _long_case()
    weight.requires_grad_()
    torch.log_softmax(hidden @ weight.T, -1).gather(-1, labels[:, None])[:, 0].backward(grad)
    errors = []
    for chunk_tokens in (4096, 64):
        (found,) = pool.run(_weight_gradient, chunk_tokens, world_size=1)
        errors.append(((found.float() - weight.grad).norm() / weight.grad.norm()).item())
    assert errors[1] < 1.5 * errors[0], f"relative errors {errors}: more chunks, more rounding"


def _vector(rank: int, args: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    import torch.distributed as dist

    from megarl.megatron.logprobs import logprobs_and_entropy, vocab_shard

    logits = torch.tensor(args["logits"]).flatten(0, -2)
    vocab = logits.shape[-1]
    rows = -(-vocab // 2)
    shard = vocab_shard(dist.group.WORLD, rows, vocab)
    # Logits as they are: the hidden states are the logits, and the weight is the unit matrix.
    weight = torch.eye(vocab)[shard.start : shard.start + shard.size]
    padded = torch.cat([weight, torch.ones(rows - shard.size, vocab)])
    labels = torch.tensor(args["labels"]).flatten()
    return logprobs_and_entropy(logits, padded, labels, shard, temperature=args.get("temperature", 1.0))


@pytest.mark.dist
def test_logprobs_equal_the_vectors(pool: RankPool) -> None:
    cases = json.loads((Path(__file__).parents[1] / "algos" / "vectors.json").read_text())["cases"]
    cases = [case for case in cases if case["fn"] == "token_statistics"]
    assert len(cases) == 2
    for case in cases:
        for logprobs, entropy in pool.run(_vector, case["args"], world_size=2):
            for got, name in ((logprobs, "logprobs"), (entropy, "entropy")):
                want = torch.tensor(case["expected"][name]).flatten()
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=lambda m, c=case: f"{c['id']}: {m}")
