"""The divergence over a split vocabulary against that of whole logits, with gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.algos import kl
from megarl.data.packing import scatter
from megarl.types import Layout
from tests.megatron.samples import random_chunks
from tests.megatron.tiny import load_role, save_model
from tests.oracle.models import Sample, token_logits
from tests.pool import RankPool

VOCAB, HIDDEN, TOKENS = 37, 8, 11


def _case() -> list[torch.Tensor]:
    """Hidden states and output layer of the policy, those of the reference, and the gradient of the divergence."""
    generator = torch.Generator().manual_seed(4)
    shapes = [(TOKENS, HIDDEN), (VOCAB, HIDDEN), (TOKENS, HIDDEN), (VOCAB, HIDDEN), (TOKENS,)]
    return [torch.randn(*shape, generator=generator) / 2 for shape in shapes]


def _sharded(rank: int, rows: int, temperature: float, chunk_tokens: int) -> tuple[torch.Tensor, ...]:
    import torch.distributed as dist

    from megarl.megatron.logprobs import divergence, vocab_shard

    hidden, weight, ref_hidden, ref_weight, grad = _case()
    shard = vocab_shard(dist.group.WORLD, rows, VOCAB)
    local, ref_local = (torch.full((rows, HIDDEN), 50.0) for _ in range(2))  # padding that would dominate
    local[: shard.size] = weight[shard.start : shard.start + shard.size]
    ref_local[: shard.size] = ref_weight[shard.start : shard.start + shard.size]
    hidden.requires_grad_()
    local.requires_grad_()
    found = divergence(hidden, local, ref_hidden, ref_local, shard, temperature=temperature, chunk_tokens=chunk_tokens)
    found.backward(grad)
    return found.detach(), hidden.grad, local.grad


# Rows per rank with padding at the end; in the last case one rank holds nothing but padding.
@pytest.mark.dist
@pytest.mark.parametrize(("world_size", "rows"), [(1, 64), (2, 19), (4, 16)])
@pytest.mark.parametrize(("temperature", "chunk_tokens"), [(1.0, 1024), (0.7, 4)])
def test_divergence_equals_that_of_full_logits(
    pool: RankPool, world_size: int, rows: int, temperature: float, chunk_tokens: int
) -> None:
    hidden, weight, ref_hidden, ref_weight, grad = _case()
    hidden.requires_grad_()
    weight.requires_grad_()
    expected = kl.full(hidden @ weight.T / temperature, ref_hidden @ ref_weight.T / temperature)
    expected.backward(grad)
    results = pool.run(_sharded, rows, temperature, chunk_tokens, world_size=world_size)
    for found, hidden_grad, _ in results:
        torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=5e-6)
        torch.testing.assert_close(hidden_grad, hidden.grad, rtol=1e-5, atol=5e-6)
    weight_grad = torch.cat([result[2] for result in results])
    torch.testing.assert_close(weight_grad[:VOCAB], weight.grad, rtol=1e-5, atol=5e-6)
    assert not weight_grad[VOCAB:].any(), "padding rows must not get a gradient"


def _of_roles(rank: int, actor: Path, reference: Path) -> torch.Tensor:
    """[T]: the divergence at each response token of random samples, row after row, at temperature 0.7."""
    from megarl.data.schedule import inference_schedule
    from megarl.megatron.losses import ReferenceDivergence
    from megarl.megatron.parallel import GroupCache
    from megarl.megatron.pipeline import micro_batches, run_forward

    cache = GroupCache()
    roles = {
        "actor": load_role(actor, "actor", Layout(), rank, cache, trainable=False, head=None),
        "reference": load_role(reference, "reference", Layout(), rank, cache, trainable=False, head=None),
    }
    chunks, infos = random_chunks()
    schedule = inference_schedule(infos, Layout(), 40).ranks[0]
    found = ReferenceDivergence(roles["actor"], roles["reference"], chunks, schedule, temperature=0.7)
    model = roles["actor"].model
    results = run_forward(model, micro_batches(model, schedule, chunks), schedule.pack_tokens, found)
    by_chunk = scatter([row for rows in schedule.packs for row in rows], torch.cat(results).numpy())
    return torch.from_numpy(np.concatenate([by_chunk[i].values for i in sorted(by_chunk)]))


@pytest.mark.dist
def test_a_role_computes_the_divergence_from_its_reference(pool: RankPool, tmp_path: Path) -> None:
    directories = [save_model(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    (found,) = pool.run(_of_roles, *directories, world_size=1)
    actor, reference = (AutoModelForCausalLM.from_pretrained(directory).eval() for directory in directories)
    expected = []
    for chunk in random_chunks()[0]:
        for prompt, response in zip(chunk.prompt_ids, chunk.response_ids, strict=True):
            sample = Sample(sample_id="", prompt_ids=prompt.tolist(), response_ids=response.tolist())
            with torch.no_grad():
                expected.append(kl.full(*(token_logits(model, sample) / 0.7 for model in (actor, reference))))
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-5)
