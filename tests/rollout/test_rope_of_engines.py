"""Trainers rotate as engines do: cosines and sines of every type against vLLM's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.models import model_spec
from tests.weights.models import llama_config, phi3_config

pytestmark = pytest.mark.process
POSITIONS = 64
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 2.5], "long_factor": [3.0, 4.5]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
CASES = {
    "default": llama_config(),
    "linear": llama_config(rope_scaling={"rope_type": "linear", "factor": 3.0}),
    "llama3": llama_config(
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.5,
            "high_freq_factor": 6.0,
            "original_max_position_embeddings": 40,
        },
        rope_theta=1e2,
    ),
    "yarn": llama_config(rope_scaling=YARN),
    "yarn with all fields": llama_config(
        rope_scaling=YARN
        | {"beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.9, "truncate": False}
    ),
    "yarn with its factor": llama_config(rope_scaling=YARN | {"attention_factor": 1.3}),
    "partial": phi3_config(head_dim=None, hidden_size=32, partial_rotary_factor=0.5),
    "longrope, short": phi3_config(
        head_dim=None, hidden_size=16, rope_scaling=LONGROPE, original_max_position_embeddings=64
    ),
    "longrope, long": phi3_config(
        head_dim=None, hidden_size=16, rope_scaling=LONGROPE, original_max_position_embeddings=32
    ),
    "longrope of a part": phi3_config(
        head_dim=None,
        hidden_size=16,
        num_attention_heads=2,
        partial_rotary_factor=0.5,
        max_position_embeddings=256,
        rope_scaling=LONGROPE,
        original_max_position_embeddings=32,
    ),
}


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_cosines_and_sines_are_vllms(config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from transformers import AutoConfig
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope, phi3_long_rope_scaled_rope

    from megarl.megatron.rotary import rotations

    spec = model_spec(config).for_lengths(POSITIONS)
    assert spec.rope is not None
    angles, scale = rotations(spec, spec.rope)
    table = torch.outer(torch.arange(POSITIONS, dtype=torch.float32), angles)
    ours = torch.cat([table.cos(), table.sin()], dim=-1) * scale

    current = SimpleNamespace(model_config=SimpleNamespace(max_model_len=POSITIONS))
    monkeypatch.setattr(phi3_long_rope_scaled_rope, "get_current_vllm_config", lambda: current)
    stated = {name: value for name, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    stored = AutoConfig.from_pretrained(tmp_path)
    with set_current_vllm_config(VllmConfig()):
        engine = get_rope(
            spec.dims.head_dim,
            stored.max_position_embeddings,
            rope_parameters=stored.rope_parameters,
            dtype=torch.float32,
        )
    if spec.rope.kind == "longrope":
        first = spec.rope.original if engine.use_long_rope else 0
        theirs = engine.long_short_cos_sin_cache[first:][:POSITIONS]
    else:
        theirs = engine.cos_sin_cache[:POSITIONS]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
