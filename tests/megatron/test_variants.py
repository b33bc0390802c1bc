"""Models of other makers against Hugging Face: families, heads, vocabularies, dtypes, one file or many."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.types import Layout, RolloutChunk
from tests.megatron.samples import random_chunks
from tests.megatron.tiny import save_model
from tests.pool import RankPool

VARIANTS: dict[str, tuple[str, dict[str, Any], Layout]] = {
    "one-kv-head": ("qwen2", {"num_key_value_heads": 1}, Layout(pp=2, dp=2)),
    "all-kv-heads": ("llama", {"num_key_value_heads": 8}, Layout(tp=4)),
    "kv-heads-of-tp": ("qwen2", {"num_key_value_heads": 2}, Layout(tp=2, pp=2)),
    "wide-heads": ("llama", {"head_dim": 16}, Layout(tp=2, pp=2, sequence_parallel=True)),
    "prime-vocabulary": ("qwen2", {"vocab_size": 101}, Layout(tp=4)),
    "prime-vocabulary-tied": ("llama", {"vocab_size": 101, "tie_word_embeddings": True}, Layout(tp=2, pp=2)),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}, Layout(tp=2, dp=2)),
    "rope-base": ("qwen2", {"rope_theta": 500.0}, Layout(tp=2, pp=2, vpp=2)),
    "bfloat16": ("qwen2", {"dtype": "bfloat16"}, Layout(tp=2, pp=2)),
    "bfloat16-tied": ("llama", {"dtype": "bfloat16", "tie_word_embeddings": True}, Layout(pp=4)),
}


def variant_logprobs(rank: int, directory: Path, layout: Layout, chunks: list[RolloutChunk]) -> dict[int, Any] | None:
    """Imported as a run does: every rank reads its own regions of the files."""
    from megarl.data.schedule import inference_schedule
    from megarl.megatron.model_engine import ModelEngine
    from megarl.megatron.parallel import GroupCache
    from megarl.models import model_spec
    from megarl.weights.hf_files import load_shard, read_config

    spec = model_spec(read_config(directory))
    role = ModelEngine(
        "actor",
        spec,
        layout,
        rank,
        GroupCache(),
        vocab_size=spec.dims.vocab,
        dtype=getattr(torch, spec.dtype),
        trainable=False,
    )
    role.load(load_shard(role.shard_map, directory, spec.manifest(role.head, new_head=False)))
    _, infos = random_chunks()
    return role.logprobs(inference_schedule(infos, layout, 60).ranks[role.coords.dp], chunks, temperature=1.0)


def hugging_face_logprobs(directory: Path, chunks: list[RolloutChunk], dtype: torch.dtype) -> torch.Tensor:
    """Of all response tokens, by chunk and row; the files' weights, computed with in ``dtype``."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    found = []
    for chunk in chunks:
        for prompt_ids, response_ids in zip(chunk.prompt_ids, chunk.response_ids, strict=True):
            prompt, response = torch.from_numpy(prompt_ids).long(), torch.from_numpy(response_ids).long()
            with torch.no_grad():
                logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1].float()
            found.append(torch.log_softmax(logits, -1).gather(-1, response[:, None])[:, 0])
    return torch.cat(found)


def in_order(ranks: list[dict[int, Any] | None]) -> torch.Tensor:
    """What the reporting ranks returned, as ``hugging_face_logprobs`` orders it."""
    merged = {chunk: rows for rank in ranks if rank for chunk, rows in rank.items()}
    return torch.cat([torch.from_numpy(merged[chunk].values.copy()) for chunk in sorted(merged)])


@pytest.mark.dist
@pytest.mark.parametrize("name", VARIANTS)
def test_variant_equals_hugging_face(pool: RankPool, tmp_path: Path, name: str) -> None:
    kind, fields, layout = VARIANTS[name]
    directory = save_model(tmp_path / "model", kind, **fields)
    chunks, _ = random_chunks()
    found = in_order(pool.run(variant_logprobs, directory, layout, chunks, world_size=layout.world_size))
    expected = hugging_face_logprobs(directory, chunks, torch.float32)
    if "dtype" not in fields:
        assert (found - expected).abs().max().item() <= 1e-5 * max(1.0, expected.abs().max().item())
        return
    # In bfloat16 each program rounds in its own way; ours may not be further from the truth than theirs, in the mean.
    theirs = hugging_face_logprobs(directory, chunks, torch.bfloat16)
    assert (found - expected).abs().mean() <= 1.5 * (theirs - expected).abs().mean()


@pytest.mark.dist
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_in_many_files(pool: RankPool, tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    whole = save_model(tmp_path / "whole", tie_word_embeddings=tied)
    directory = tmp_path / "parts"
    AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32).save_pretrained(directory, max_shard_size="20KB")
    files = set(json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"].values())
    assert len(files) > 3
    chunks, _ = random_chunks()
    layout = Layout(tp=2, pp=2)
    one, many = (in_order(pool.run(variant_logprobs, d, layout, chunks, world_size=4)) for d in (whole, directory))
    assert torch.equal(one, many)
