"""Every family, synced from Megatron's layouts into live engines: equal to engines that loaded the files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.types import Layout, Ragged
from tests.rollout.conftest import ask, sequences, start
from tests.rollout.engine_process import EngineProcess
from tests.rollout.models import FAMILIES, ONLY_BFLOAT16, family, random_model, save
from tests.rollout.oracles import assert_close, assert_same, hf_raw_logprobs
from tests.rollout.syncing import sync

pytestmark = [pytest.mark.e2e]

DENSE = Layout(tp=2, pp=2)
MIXTURES = {
    "deepseek_v2": Layout(tp=2, dp=2, ep=2, sequence_parallel=True),
    "deepseek_v3": Layout(pp=2, dp=2, ep=2),
    "glm4_moe": Layout(pp=2, dp=2, ep=2),
    "glm4_moe_lite": Layout(pp=2, dp=2, ep=2),
    "gpt_oss": Layout(tp=2, dp=2, ep=2, sequence_parallel=True),
    "mixtral": Layout(pp=2, dp=3, ep=3),
    "qwen3_moe": Layout(tp=1, pp=2, dp=2, ep=2),
    "qwen3_next": Layout(tp=2, dp=2, ep=2, sequence_parallel=True),
    "qwen3_5_moe_text": Layout(pp=2, dp=2, ep=2),
    "qwen2_moe": Layout(dp=2, ep=2),
}
TELLING = {("gpt2", 1), ("qwen3", 1), ("qwen3_moe", 2), ("deepseek_v3", 1)}
"""Of the product, what the default suite runs: learned positions and LayerNorms, norms of heads, experts, latents."""
BFLOAT16_NOISE = 0.3
"""How far transformers in bfloat16 is from itself in float32: 0.29 and 0.20 with the two seeds' weights."""
BFLOAT16_MIXTURES = 0.85
"""Share of tokens within that, for experts: transformers in bfloat16 has 0.91 to 0.99, as others are chosen."""

EVERY = [
    pytest.param(kind, tp, id=f"{kind}-tp{tp}", marks=() if (kind, tp) in TELLING else pytest.mark.matrix)
    for kind in FAMILIES
    for tp in (1, 2)
]


@pytest.mark.parametrize(("kind", "tp"), EVERY)
def test_a_synced_engine_equals_one_that_loaded_the_files(
    process: EngineProcess, tmp_path: Path, kind: str, tp: int
) -> None:
    """An engine of the first files takes other weights, and the first again, as Megatron's ranks hold them."""
    dtype = "bfloat16" if kind in ONLY_BFLOAT16 else "float32"
    first, other = (save(random_model(family(kind, dtype=dtype), seed), tmp_path / str(seed)) for seed in (1, 2))
    layout = MIXTURES.get(kind, DENSE)
    start(process, first, weights="files")
    expected = ask(process)
    if tp > 1:
        start(process, other, tp=tp)
    sync(process, other, 1, layout)
    moved = ask(process)
    _assert_near(moved.raw, hf_raw_logprobs(other, sequences()), kind, "vLLM against transformers")
    sync(process, first, 2, layout)
    if tp == 1:
        assert_same(ask(process), expected)
    elif kind in ONLY_BFLOAT16:  # which samples other tokens as soon as sums round elsewhere
        _assert_near(ask(process).raw, expected.raw, kind, "TP 2 against TP 1")
    else:
        assert_same(ask(process), expected, atol=1e-5)  # the sums of a split matrix round elsewhere


@pytest.mark.parametrize("kind", [pytest.param("glm4_moe", marks=pytest.mark.matrix), "deepseek_v3"])
def test_parts_of_routers_stay_in_float32(process: EngineProcess, tmp_path: Path, kind: str) -> None:
    """In a bfloat16 model, which starts only if its maps have the dtypes of vLLM's parameters."""
    first, other = (save(random_model(family(kind, dtype="bfloat16"), seed), tmp_path / str(seed)) for seed in (1, 2))
    start(process, first, weights="files")
    expected = ask(process)
    sync(process, other, 1, MIXTURES[kind])
    sync(process, first, 2, MIXTURES[kind])
    assert_same(ask(process), expected)


def _assert_near(got: Ragged, expected: Ragged, kind: str, what: str) -> None:
    if kind not in ONLY_BFLOAT16:
        assert_close(got, expected, 1e-4, what)
    elif kind not in MIXTURES:
        assert_close(got, expected, BFLOAT16_NOISE, what)
    else:
        near = np.abs(got.values - expected.values) <= BFLOAT16_NOISE
        assert near.mean() >= BFLOAT16_MIXTURES, f"{what}: {near.mean():.0%} of the tokens are near"


def _whole(decoder: Path, directory: Path) -> Path:
    """Writes files of the model that has the decoder and a vision tower, of which a tensor stands for all."""
    config = json.loads((decoder / "config.json").read_text())
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(decoder / "model.safetensors").items()
    }
    tensors["model.visual.patch_embed.proj.bias"] = torch.ones(8)
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    whole = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": config["dtype"],
        "text_config": config,
        "tie_word_embeddings": config["tie_word_embeddings"],
    }
    (directory / "config.json").write_text(json.dumps(whole))
    return directory


@pytest.mark.matrix
def test_files_of_a_whole_model_serve_its_decoder(process: EngineProcess, tmp_path: Path) -> None:
    first, other = (
        save(random_model(family("qwen3_5_text", dtype="bfloat16"), seed), tmp_path / str(seed)) for seed in (1, 2)
    )
    start(process, first, weights="files")
    expected = ask(process)
    whole = _whole(first, tmp_path / "whole")
    start(process, whole, weights="files")
    assert_same(ask(process), expected)
    sync(process, _whole(other, tmp_path / "other"), 1, DENSE)
    sync(process, whole, 2, DENSE)
    assert_same(ask(process), expected)
