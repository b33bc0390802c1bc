"""GRPO of Qwen3-4B on one H100 and of Qwen3-8B on eight, planned from the sizes in their config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.config import load
from megarl.preflight.device_memory import check_memory
from megarl.preflight.memory_plan import plan_memory

GIB = 1 << 30
H100_GIB = 79.1
QWEN3 = {
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": 151936,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
}
SIZES = {
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
}


@pytest.mark.parametrize(
    ("size", "devices", "actor"),
    [
        ("4B", 1, {"tokens_per_micro_batch": 8192, "recompute": "full"}),
        ("8B", 8, {"tokens_per_micro_batch": 16384, "recompute": "full"}),
        ("8B", 8, {"tokens_per_micro_batch": 16384, "recompute": "selective", "tp": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_run_fits_and_its_cache_takes_half_of_the_device(
    tmp_path: Path, size: str, devices: int, actor: dict[str, Any]
) -> None:
    """Trainers and engines share the devices; 64 prompts with 8 responses of up to 2048 tokens."""
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3, **SIZES[size]}))
    everywhere = f"0-{devices - 1}"
    roles = {"actor": {"offload": True, **actor}, "reference": {"offload": True, "tokens_per_micro_batch": 16384}}
    fields = {
        "stage": "ppo",
        "run": {"dir": str(tmp_path / "run"), "steps": 100},
        "model": {"path": str(tmp_path)},
        "cluster": {"devices_per_node": devices, "device_memory_gib": H100_GIB},
        "groups": {"train": {"devices": everywhere, "roles": roles}},
        "rollout": {"devices": everywhere, "max_new_tokens": 2048, "max_model_len": 4096},
        "data": {
            "random": {"count": 6400, "min_tokens": 64, "max_tokens": 512},
            "prompts_per_step": 64,
            "samples_per_prompt": 8,
        },
        "algo": {"advantage": "grpo", "kl": {"in": "loss", "estimator": "k3", "coef": 0.001}, "mini_batches": 2},
        "actor": {"optimizer": {"lr": 1e-6}},
        "reward": {"functions": [{"name": "length"}]},
    }
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(fields))
    config = load(path)
    check_memory(config)
    plans = plan_memory(config)
    assert len(plans) == devices
    for plan in plans:
        peaks = {phase.phase: phase.peak / GIB for phase in plan.phases()}
        assert peaks.keys() == {"generate", "inference", "update", "sync", "checkpoint"}
        assert max(peaks.values()) < H100_GIB, peaks
        assert peaks["generate"] == pytest.approx(0.95 * H100_GIB)
        assert plan.engine is not None
        assert plan.engine.cache > 0.5 * H100_GIB * GIB
