"""Tiny HF configs with odd sizes, and simulated holders whose elements are canonical ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from megarl.weights.plan import TransferPlan
from megarl.weights.shard_map import ShardMap, TensorInfo

Arrays = dict[str, npt.NDArray[Any]]


def qwen2_config(**changes: Any) -> dict[str, Any]:
    """A Qwen2 with a prime vocabulary."""
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 131,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": False,
    }
    return config | changes


def llama_config(**changes: Any) -> dict[str, Any]:
    """A Llama whose heads are wider than hidden / heads."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 67,
        "hidden_size": 20,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 6,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
    }
    return config | changes


def mistral_config(**changes: Any) -> dict[str, Any]:
    """A Mistral with one KV head."""
    config = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": 24,
        "num_key_value_heads": 1,
        "sliding_window": None,
        "head_dim": None,
    }
    return llama_config() | config | changes


def qwen3_config(**changes: Any) -> dict[str, Any]:
    """A Qwen3 with three KV heads, and heads wider than hidden / heads."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 10,
    }
    return qwen2_config() | config | changes


def phi3_config(**changes: Any) -> dict[str, Any]:
    """A Phi-3 with two KV heads, whose files have queries, keys and values in one tensor."""
    config = {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_size": 24,
        "num_key_value_heads": 2,
        "pad_token_id": None,
    }
    return llama_config() | config | changes


def gpt2_config(**changes: Any) -> dict[str, Any]:
    """A GPT-2 whose heads have an odd width, and whose MLP has the default one."""
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": 61,
        "n_embd": 20,
        "n_inner": None,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 48,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return config | changes


def mixtral_config(**changes: Any) -> dict[str, Any]:
    """A Mixtral with three experts."""
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_key_value_heads": 2,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    }
    return llama_config() | config | changes


def qwen3_moe_config(**changes: Any) -> dict[str, Any]:
    """A Qwen3 with four experts; no layer has an MLP of ``intermediate_size``."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "moe_intermediate_size": 12,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }
    return qwen3_config() | config | changes


CONFIGS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "llama": llama_config,
    "mistral": mistral_config,
    "qwen2": qwen2_config,
    "qwen3": qwen3_config,
    "phi3": phi3_config,
    "gpt2": gpt2_config,
    "mixtral": mixtral_config,
    "qwen3_moe": qwen3_moe_config,
}
"""Tiny models of all families."""


def numbered(tensors: Mapping[str, TensorInfo]) -> Arrays:
    """Canonical tensors in which no two elements are equal."""
    arrays: Arrays = {}
    first = 1
    for name, info in tensors.items():
        size = int(np.prod(info.shape))
        arrays[name] = np.arange(first, first + size, dtype=np.int64).reshape(info.shape)
        first += size
    return arrays


def held(shard_map: ShardMap, canonical: Arrays) -> Arrays:
    """What a holder has in its parameters; zero in padding."""
    arrays = {name: np.zeros(info.shape, np.int64) for name, info in shard_map.params.items()}
    for shard in shard_map.shards:
        values = canonical[shard.name][shard.region.slices]
        values = values.T if shard.transposed else values
        arrays[shard.param][shard.box.slices] = values.reshape(shard.box.shape)
    return arrays


def execute(plan: TransferPlan, sources: Mapping[int, Arrays]) -> dict[int, tuple[Arrays, Arrays]]:
    """Carries out a plan on arrays: per receiver, its parameters and how often each element was written."""
    results: dict[int, tuple[Arrays, Arrays]] = {}
    for rank, receiver in plan.receivers.items():
        values = {name: np.zeros(info.shape, np.int64) for name, info in receiver.params.items()}
        results[rank] = values, {name: np.zeros_like(array) for name, array in values.items()}
    for sender in plan.senders.values():
        for message in sender.messages:
            values, writes = results[message.receiver]
            for copy in message.copies:
                data = sources[message.sender][copy.source][copy.source_box.slices]
                values[copy.target][copy.target_box.slices] = copy.arranged(data)
                writes[copy.target][copy.target_box.slices] += 1
    return results
