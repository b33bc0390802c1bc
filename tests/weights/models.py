"""Tiny HF configs with odd sizes, and simulated holders whose elements are canonical ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megarl.weights.plan import TransferPlan
from megarl.weights.shard_map import ShardMap, TensorInfo

Arrays = dict[str, npt.NDArray[Any]]


_Config = Callable[..., dict[str, Any]]


def _config(*parts: Mapping[str, Any]) -> _Config:
    """A function that returns a config of these fields, the later ones first, and of changes."""

    def config(**changes: Any) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for part in (*parts, changes):
            fields |= deepcopy(dict(part))  # transformers writes into nested fields
        return fields

    return config


_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 131,  # a prime number
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
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 67,
    "hidden_size": 20,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 6,  # wider than hidden / heads
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}
_MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 24,
    "num_key_value_heads": 1,
    "sliding_window": None,
    "head_dim": None,
}
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
}
_PHI3 = {
    "architectures": ["Phi3ForCausalLM"],  # whose files have queries, keys and values in one tensor
    "model_type": "phi3",
    "hidden_size": 24,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}
_GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 61,
    "n_embd": 20,  # heads of an odd width
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
_MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_key_value_heads": 2,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
_QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "moe_intermediate_size": 12,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
_QWEN3_5 = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
    "full_attention_interval": 2,
}
_QWEN2_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
_SEVERAL_KINDS = {"mlp_only_layers": [0, 2], "intermediate_size": 36}
qwen2_config = _config(_QWEN2)
llama_config = _config(_LLAMA)
mistral_config = _config(_LLAMA, _MISTRAL)
qwen3_config = _config(_QWEN2, _QWEN3)
phi3_config = _config(_LLAMA, _PHI3)
gpt2_config = _config(_GPT2)
mixtral_config = _config(_LLAMA, _MIXTRAL)
qwen3_moe_config = _config(_QWEN2, _QWEN3, _QWEN3_MOE)
qwen2_moe_config = _config(_QWEN2, _QWEN2_MOE)
qwen3_5_config = _config(_QWEN2, _QWEN3_5)
_HYBRID_MOE = {
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
qwen3_5_moe_config = _config(
    _QWEN2,
    _QWEN3_5,
    _HYBRID_MOE,
    {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"},
)
qwen3_next_config = _config(
    _QWEN2,
    _QWEN3_5,
    _HYBRID_MOE,
    {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"},
)
_GLM4_MOE = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "head_dim": 8,
    "attention_bias": True,
    "moe_intermediate_size": 12,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
glm4_moe_config = _config(_QWEN2, _GLM4_MOE)
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
    "q_lora_rank": 10,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "n_group": 1,
    "topk_group": 1,
}
deepseek_v3_config = _config(
    _QWEN2,
    _GLM4_MOE,
    _LATENT,
    {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "head_dim": 4,
        "attention_bias": False,
    },
)
deepseek_v2_config = _config(
    deepseek_v3_config(),
    {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "topk_method": "greedy",
        "scoring_func": "softmax",
    },
)
glm4_moe_lite_config = _config(
    deepseek_v3_config(),
    {"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite"},
)
gemma3_config = _config(
    _QWEN2,
    {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 5,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 10,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "tie_word_embeddings": True,
    },
)
gpt_oss_config = _config(
    _QWEN2,
    {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "rms_norm_eps": 1e-5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 12,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
)
_VISION = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 24}
qwen3_5_whole_config = _config(
    {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": qwen3_5_config(),
        "vision_config": {"model_type": "qwen3_5_vision", "num_position_embeddings": 4, "patch_size": 2, **_VISION},
        "tie_word_embeddings": False,
    }
)
qwen3_5_moe_whole_config = _config(
    {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": qwen3_5_moe_config(),
        "vision_config": {"model_type": "qwen3_5_moe_vision", "num_position_embeddings": 4, "patch_size": 2, **_VISION},
        "tie_word_embeddings": False,
    }
)
CONFIGS: Mapping[str, _Config] = {
    "llama": llama_config,
    "mistral": mistral_config,
    "qwen2": qwen2_config,
    "qwen3": qwen3_config,
    "phi3": phi3_config,
    "gpt2": gpt2_config,
    "mixtral": mixtral_config,
    "qwen3_moe": qwen3_moe_config,
    "several_kinds": _config(_QWEN2, _QWEN3, _QWEN3_MOE, _SEVERAL_KINDS),
}
"""Tiny models of the families that naive.py has."""


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
        values = values.swapaxes(-2, -1) if shard.transposed else values
        arrays[shard.param][shard.box.slices] = values.reshape(shard.box.shape)
    return arrays


def placed(
    tensors: Mapping[str, torch.Tensor], shard_map: ShardMap, *, padding: float = 0.0
) -> dict[str, torch.Tensor]:
    """A holder's parameters, shard by shard out of a model's tensors."""
    device = next(iter(tensors.values())).device
    params: dict[str, torch.Tensor] = {}
    for name, info in shard_map.params.items():
        params[name] = torch.full(info.shape, padding, dtype=getattr(torch, info.dtype), device=device)
    for shard in shard_map.shards:
        values = tensors[shard.name][shard.region.slices]
        params[shard.param][shard.box.slices] = (values.mT if shard.transposed else values).reshape(shard.box.shape)
    return params


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
