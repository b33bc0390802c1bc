"""Transformer Engine's layers against Megatron's own: numbers and checkpoints; and the fused kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.megatron.platform.kernels import FUSED
from megarl.types import Layout
from tests.gpu.conftest import has_transformer_engine
from tests.megatron.samples import random_chunks
from tests.megatron.test_head_sizes import computed, distances, expected
from tests.megatron.test_kernels import check_fused_kernels
from tests.megatron.test_transformer_engine import check_exchange, exchanged
from tests.megatron.tiny import save_model
from tests.pool import RankPool

pytestmark = pytest.mark.gpu

HEADS = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
GPT2 = {"n_embd": 256, "n_head": 4, "n_layer": 2}


@pytest.fixture
def installed(gpu: RankPool) -> RankPool:
    """A rank on a GPU that has Transformer Engine's layers."""
    if not has_transformer_engine():
        pytest.skip("needs Transformer Engine, and compute capability 9.0 for its packed attention")
    return gpu


def model(directory: Path, kind: str) -> Path:
    return save_model(directory, kind, dtype="bfloat16", **(GPT2 if kind == "gpt2" else HEADS))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "phi3", "gpt2"])
def test_errors_are_no_larger_than_those_of_local_layers(installed: RankPool, tmp_path: Path, kind: str) -> None:
    """Log-probabilities and gradients of packed samples, each against Hugging Face in float64."""
    directory, chunks = model(tmp_path / "model", kind), random_chunks()[0]
    truth = expected(directory, chunks, torch.float64)
    found: dict[str, Any] = {}
    for layers in ("local", "transformer_engine"):
        (results,) = installed.run(computed, directory, torch.bfloat16, "", layers, world_size=1)
        found[layers] = distances(results, truth)
    fused, local = found["transformer_engine"], found["local"]
    assert {name for name in fused if not fused[name] <= 1.5 * local[name] + 1e-3} == set(), found


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_each_kind_of_layers_reads_the_checkpoint_of_the_other(installed: RankPool, tmp_path: Path, kind: str) -> None:
    (tmp_path / "out").mkdir()
    arguments = model(tmp_path / "model", kind), Layout(), torch.bfloat16, tmp_path / "out", False
    check_exchange(installed.run(exchanged, *arguments, world_size=1))


def test_fused_kernels_equal_the_reference(cuda: str) -> None:
    check_fused_kernels(cuda, FUSED)
