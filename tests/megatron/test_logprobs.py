"""Vocab-parallel log-probabilities, entropy and divergence against whole logits, with gradients."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.algos import kl
from megarl.data.packing import scatter
from megarl.data.schedule import inference_schedule
from megarl.megatron.logprobs import divergence, logprobs_and_entropy, vocab_shard
from megarl.megatron.losses import ReferenceDivergence
from megarl.megatron.parallel import GroupCache
from megarl.megatron.pipeline import micro_batches, run_forward
from megarl.types import Layout
from tests.megatron.compare import samples_of, state_of
from tests.megatron.samples import random_chunks
from tests.megatron.tiny import load_role, save_model
from tests.oracle.models import causal_lm, token_logits
from tests.pool import RankPool

VOCAB, HIDDEN, TOKENS = 37, 8, 11


def _case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    labels = torch.randint(VOCAB, (TOKENS,), generator=generator)
    return hidden, weight, labels, torch.randn(TOKENS, generator=generator), torch.randn(TOKENS, generator=generator)


def _cut(weight: torch.Tensor, rows: int) -> tuple[torch.Tensor, Any]:
    """This rank's rows of an output layer, with padding that would dominate, were it counted, and the shard."""
    import torch.distributed as dist

    shard = vocab_shard(dist.group.WORLD, rows, VOCAB)
    local = torch.full((rows, HIDDEN), 50.0)
    local[: shard.size] = weight[shard.start : shard.start + shard.size]
    return local, shard


def _sharded(
    rank: int, rows: int, temperature: float, chunk_tokens: int, fused: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    hidden, weight, labels, grad_logprobs, grad_entropy = _case()
    local, shard = _cut(weight, rows)
    hidden = hidden.to(dtype).requires_grad_()
    local = local.to(dtype).requires_grad_()
    logprobs, entropy = logprobs_and_entropy(
        hidden, local, labels, shard, temperature=temperature, chunk_tokens=chunk_tokens, fused=fused
    )
    torch.autograd.backward([logprobs, entropy], [grad_logprobs, grad_entropy])
    return logprobs.detach(), entropy.detach(), hidden.grad, local.grad


# Rows per rank with padding at the end; in the last case one rank holds nothing but padding.
@pytest.mark.dist
@pytest.mark.parametrize(("world_size", "rows"), [(1, 64), (2, 19), (4, 10), (4, 16)])
@pytest.mark.parametrize(
    ("temperature", "chunk_tokens", "fused", "dtype"),
    [
        (1.0, 1024, False, torch.float32),
        (0.7, 4, False, torch.float32),
        (0.7, 4, True, torch.float32),
        (0.7, 4, True, torch.bfloat16),
    ],
)
def test_logprobs_equal_softmax_over_the_whole_vocabulary(
    pool: RankPool,
    world_size: int,
    rows: int,
    temperature: float,
    chunk_tokens: int,
    fused: bool,
    dtype: torch.dtype,
) -> None:
    """In float64 from the same numbers; in bfloat16 products are rounded, and gradients."""
    hidden, weight, labels, grad_logprobs, grad_entropy = _case()
    hidden = hidden.to(dtype).double().requires_grad_()
    weight = weight.to(dtype).double().requires_grad_()
    logits = hidden @ weight.T / temperature
    log_p = torch.log_softmax(logits, dim=-1)
    logprobs = log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    entropy = torch.distributions.Categorical(logits=log_p).entropy()
    torch.autograd.backward([logprobs, entropy], [grad_logprobs.double(), grad_entropy.double()])
    assert hidden.grad is not None
    assert weight.grad is not None

    results = pool.run(_sharded, rows, temperature, chunk_tokens, fused, dtype, world_size=world_size)
    weight_grad = torch.cat([result[3] for result in results])
    close = 2e-6
    gradient_close = 2e-6
    if dtype == torch.bfloat16:
        close = 2**-8 * float(logits.abs().max())
        gradient_close = 2**-6 * float(hidden.grad.abs().max())
    for got_logprobs, got_entropy, hidden_grad, _ in results:
        torch.testing.assert_close(got_logprobs.double(), logprobs.detach(), rtol=0, atol=close)
        torch.testing.assert_close(got_entropy.double(), entropy.detach(), rtol=0, atol=close)
        torch.testing.assert_close(hidden_grad.double(), hidden.grad, rtol=1e-5, atol=gradient_close)
    torch.testing.assert_close(weight_grad[:VOCAB].double(), weight.grad, rtol=1e-5, atol=gradient_close)
    assert not weight_grad[VOCAB:].any(), "padding rows must not get a gradient"


def _kept_case() -> torch.Tensor:
    """[TOKENS, 7] ids: the labels, then others and -1 at random places; for one token its label alone."""
    labels = _case()[2]
    generator = torch.Generator().manual_seed(6)
    kept = torch.stack([torch.randperm(VOCAB, generator=generator)[:7] for _ in labels])
    kept[torch.rand(kept.shape, generator=generator) < 0.3] = -1
    kept[kept == labels[:, None]] = -1
    kept[3, :] = -1
    kept[:, 0] = labels
    return kept.int()


def _sharded_kept(rank: int, rows: int, chunk_tokens: int) -> tuple[torch.Tensor, ...]:
    hidden, weight, _, *slopes = _case()
    local, shard = _cut(weight, rows)
    hidden.requires_grad_()
    local.requires_grad_()
    results = logprobs_and_entropy(hidden, local, _kept_case(), shard, temperature=0.7, chunk_tokens=chunk_tokens)
    torch.autograd.backward(results, slopes)
    return results[0].detach(), results[1].detach(), hidden.grad, local.grad


@pytest.mark.dist
@pytest.mark.parametrize(("world_size", "rows"), [(1, 64), (2, 19), (4, 16)])
def test_logprobs_of_kept_ids_equal_a_softmax_over_them(pool: RankPool, world_size: int, rows: int) -> None:
    hidden, weight, labels, *slopes = _case()
    hidden.requires_grad_()
    weight.requires_grad_()
    expected: list[torch.Tensor] = []
    for logits, label, ids in zip(hidden @ weight.T / 0.7, labels, _kept_case().long(), strict=True):
        own = ids[ids >= 0]
        distribution = torch.distributions.Categorical(logits=logits[own])
        logprob = distribution.logits[own == label].squeeze()
        expected.append(torch.stack([logprob, distribution.entropy()]))
    logprobs, entropy = torch.stack(expected).T
    torch.autograd.backward([logprobs, entropy], slopes)

    results = pool.run(_sharded_kept, rows, 4, world_size=world_size)
    weight_grad = torch.cat([result[3] for result in results])
    for found in results:
        torch.testing.assert_close(found[0], logprobs.detach(), rtol=0, atol=2e-6)
        torch.testing.assert_close(found[1], entropy.detach(), rtol=0, atol=2e-6)
        torch.testing.assert_close(found[2], hidden.grad, rtol=1e-5, atol=2e-6)
        assert found[0][3] == found[1][3] == 0, "its label is all it could be"
    torch.testing.assert_close(weight_grad[:VOCAB], weight.grad, rtol=1e-5, atol=2e-6)
    assert not weight_grad[VOCAB:].any()


def _divergence_case() -> list[torch.Tensor]:
    """Hidden states and output layer of the policy, those of the reference, and the gradient of the divergence."""
    generator = torch.Generator().manual_seed(4)
    shapes = [(TOKENS, HIDDEN), (VOCAB, HIDDEN), (TOKENS, HIDDEN), (VOCAB, HIDDEN), (TOKENS,)]
    return [torch.randn(*shape, generator=generator) / 2 for shape in shapes]


def _divergence(
    rank: int, rows: int, temperature: float, chunk_tokens: int, options: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    hidden, weight, ref_hidden, ref_weight, grad = _divergence_case()
    (local, shard), (ref_local, _) = _cut(weight, rows), _cut(ref_weight, rows)
    hidden.requires_grad_()
    local.requires_grad_()
    options = {**options, "temperature": temperature, "chunk_tokens": chunk_tokens}
    found = divergence(hidden, local, ref_hidden, ref_local, shard, **options)
    found.backward(grad)
    return found.detach(), hidden.grad, local.grad


@pytest.mark.dist
@pytest.mark.parametrize(("world_size", "rows"), [(1, 64), (2, 19), (4, 16)])
@pytest.mark.parametrize(("temperature", "chunk_tokens"), [(1.0, 1024), (0.7, 4)])
@pytest.mark.parametrize("options", [{}, {"form": "forward"}, {"form": "jsd", "mix": 0.2}], ids=str)
def test_divergence_equals_that_of_full_logits(
    pool: RankPool, world_size: int, rows: int, temperature: float, chunk_tokens: int, options: dict[str, Any]
) -> None:
    hidden, weight, ref_hidden, ref_weight, grad = _divergence_case()
    hidden.requires_grad_()
    weight.requires_grad_()
    logits = (hidden @ weight.T / temperature, ref_hidden @ ref_weight.T / temperature)
    expected = kl.full(*logits, **options)
    expected.backward(grad)
    results = pool.run(_divergence, rows, temperature, chunk_tokens, options, world_size=world_size)
    for found, hidden_grad, _ in results:
        torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=5e-6)
        torch.testing.assert_close(hidden_grad, hidden.grad, rtol=1e-5, atol=5e-6)
    weight_grad = torch.cat([result[2] for result in results])
    torch.testing.assert_close(weight_grad[:VOCAB], weight.grad, rtol=1e-5, atol=5e-6)
    assert not weight_grad[VOCAB:].any(), "padding rows must not get a gradient"


def _weight_gradient(rank: int, chunk_tokens: int) -> torch.Tensor:
    import torch.distributed as dist

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


def _of_roles(rank: int, actor: Path, reference: Path, layout: Layout, options: Mapping[str, Any]) -> torch.Tensor:
    """[T]: the divergence at each response token of random samples, row after row, at temperature 0.7."""
    cache = GroupCache()
    roles = {
        "actor": load_role(actor, "actor", layout, rank, cache, vocab_size=VOCABULARY),
        "reference": load_role(reference, "reference", layout, rank, cache, vocab_size=VOCABULARY),
    }
    chunks, infos = random_chunks()
    schedule = inference_schedule(infos, layout, 40).ranks[0]
    found = ReferenceDivergence(roles["actor"], roles["reference"], chunks, schedule, 0.7, options)
    model = roles["actor"].model
    results = run_forward(model, micro_batches(model, schedule, chunks), schedule.pack_tokens, found)
    by_chunk = scatter([row for rows in schedule.packs for row in rows], torch.cat(results).numpy())
    return torch.from_numpy(np.concatenate([by_chunk[i].values for i in sorted(by_chunk)]))


VOCABULARY = 100
"""Ids in use; a teacher may have more."""
TEACHER = {"vocab_size": 120, "hidden_size": 48, "num_hidden_layers": 3, "num_key_value_heads": 2}


@pytest.mark.dist
@pytest.mark.parametrize(
    ("family", "fields", "layout", "options"),
    [
        ("qwen2", {}, Layout(), {}),
        ("llama", TEACHER, Layout(), {"form": "forward"}),
        ("llama", TEACHER, Layout(tp=2), {"form": "jsd", "mix": 0.2}),
    ],
)
def test_a_role_computes_the_divergence_from_its_reference(
    pool: RankPool, tmp_path: Path, family: str, fields: dict[str, Any], layout: Layout, options: dict[str, Any]
) -> None:
    actor_directory = save_model(tmp_path / "actor", seed=0)
    reference_directory = save_model(tmp_path / "reference", family, seed=1, **fields)
    results = pool.run(_of_roles, actor_directory, reference_directory, layout, options, world_size=layout.world_size)
    models = []
    for directory in (actor_directory, reference_directory):
        config = json.loads((directory / "config.json").read_text())
        models.append(causal_lm(config, state_of(directory)))
    expected = []
    for sample in samples_of(*random_chunks()):
        with torch.no_grad():
            logits = [token_logits(model, sample)[:, :VOCABULARY] / 0.7 for model in models]
            expected.append(kl.full(*logits, **options))
    for found in results:
        torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-5)
