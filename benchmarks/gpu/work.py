"""The work that is measured: runs of random Qwen2 and Qwen3 shapes, and what their metrics say."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

_KINDS = ("time/", "sync/", "rollout/", "perf/", "memory/", "response_length/mean")


@dataclass(frozen=True, kw_only=True)
class Size:
    """A shape of a model, the requests to it, and its GPUs.

    Args:
        family: qwen2, or qwen3, whose heads have 128 elements.
        tied: embeddings are also the output layer.
        recompute: of the actor and the critic.
        gpus: trainers and engines are on all of them, engines one to each.
        tp: of the trainers.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int = 151936
    dtype: str = "bfloat16"
    prompts: int = 32
    samples: int = 8
    new_tokens: int = 1024
    prompt_tokens: int = 256
    micro_batch: int = 16384
    cache_mib: int = 20000
    family: str = "qwen2"
    tied: bool = True
    recompute: str = "none"
    gpus: int = 1
    tp: int = 1

    @property
    def stop_token_ids(self) -> list[int]:
        """So many that a random model ends a response after half of the new tokens, in the mean."""
        return list(range(1, 1 + max(1, 2 * self.vocab // self.new_tokens)))

    @property
    def head_dim(self) -> int:
        return 128 if self.family == "qwen3" else self.hidden // self.heads

    @property
    def hf_config(self) -> dict[str, Any]:
        qwen3 = {"architectures": ["Qwen3ForCausalLM"], "head_dim": self.head_dim}
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": self.family,
            "dtype": self.dtype,
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "tie_word_embeddings": self.tied,
            "bos_token_id": None,
            "eos_token_id": 0,
            "pad_token_id": None,
            **(qwen3 if self.family == "qwen3" else {}),
        }


SIZES = {
    "0.5b": Size(layers=24, hidden=896, ffn=4864, heads=14, kv_heads=2),
    "1.5b": Size(layers=28, hidden=1536, ffn=8960, heads=12, kv_heads=2, micro_batch=8192, cache_mib=12000),
    "3b": Size(layers=36, hidden=2048, ffn=11008, heads=16, kv_heads=2, micro_batch=3072),
    "4b": Size(
        layers=36,
        hidden=2560,
        ffn=9728,
        heads=32,
        kv_heads=8,
        micro_batch=8192,
        family="qwen3",
        recompute="full",
    ),
    "8b-8gpu": Size(
        layers=36,
        hidden=4096,
        ffn=12288,
        heads=32,
        kv_heads=8,
        prompts=128,
        cache_mib=26000,
        family="qwen3",
        tied=False,
        gpus=8,
        tp=4,
    ),
    "tiny": Size(
        layers=2,
        hidden=128,
        ffn=256,
        heads=4,
        kv_heads=2,
        vocab=200,
        dtype="float32",
        prompts=4,
        samples=4,
        new_tokens=16,
        prompt_tokens=16,
        micro_batch=128,
        cache_mib=64,
    ),
}


def config(
    directory: Path,
    size: Size,
    device: str,
    *,
    steps: int,
    critic: bool = False,
    layers: str = "auto",
    verify: bool = True,
    **rollout: Any,
) -> Any:
    """The configuration of a run: GRPO with a reference, or PPO with a critic too.

    Args:
        verify: the sync has checksums.
        rollout: settings of the engine.
    """
    role = {
        "tokens_per_micro_batch": size.micro_batch,
        "offload": rollout.get("sleep", False),
        "tp": size.tp,
        "sequence_parallel": size.tp > 1,
    }
    devices = "0" if size.gpus == 1 else f"0-{size.gpus - 1}"
    trained = {**role, "recompute": size.recompute}
    roles = {"actor": trained, "reference": role, **({"critic": trained} if critic else {})}
    length = size.prompt_tokens + size.new_tokens
    penalty = {"max_tokens": size.new_tokens, "buffer_tokens": size.new_tokens // 2}
    grpo = {"advantage": "grpo", "kl": {"in": "loss", "estimator": "k3", "coef": 0.001}, "mini_batches": 1}
    return {
        "stage": "ppo",
        "run": {"dir": str(directory), "steps": steps, "seed": 1},
        "model": {"random": {"seed": 0, "config": size.hf_config}, "layers": layers},
        "cluster": {
            "device": device,
            "devices_per_node": size.gpus,
            "object_store_mib": 4096 if device == "cuda" else 128,
        },
        "groups": {"train": {"devices": devices, "roles": roles}},
        "rollout": {
            "devices": devices,
            "max_new_tokens": size.new_tokens,
            "max_model_len": length,
            "kv_cache_mib": size.cache_mib,
            "stop_token_ids": size.stop_token_ids,
            "sleep": False,
            **rollout,
        },
        "data": {
            "random": {"count": 4096, "min_tokens": 8, "max_tokens": size.prompt_tokens, "seed": 0},
            "prompts_per_step": size.prompts,
            "samples_per_prompt": size.samples,
        },
        "algo": {"mini_batches": 1, "kl": {"coef": 0.05}} if critic else grpo,
        "actor": {"optimizer": {"lr": 1e-6, "betas": [0.9, 0.95]}},
        **({"critic": {"optimizer": {"lr": 1e-5, "betas": [0.9, 0.95]}}} if critic else {}),
        "resharding": {"verify": verify},
        "reward": {"functions": [{"name": "soft_overlong", "args": penalty}]},
    }


def figures(directory: Path) -> dict[str, float]:
    """Means over the steps of a run but the first, which compiles, and the last, which may be profiled."""
    steps = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    later = steps[1:-1]
    names = [name for name in later[0] if name.startswith(_KINDS) and all(name in step for step in later)]
    found = {name: mean(step[name] for step in later) for name in names}
    found.pop("time/written", None)
    tokens = mean(step["perf/tokens_per_second"] * step["time/step"] for step in later)
    return {**found, "perf/tokens_per_second": tokens / found["time/step"]}
