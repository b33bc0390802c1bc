"""Tiny random Hugging Face models. vLLM's CPU attention has no heads narrower than 32."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from tests.megatron.families import LLAMA3_ROPE, YARN

VOCAB = 104  # ids of the model; vLLM pads them to 128
USED_VOCAB = 100  # ids in use; the engine must not sample the rest
END = 1
MAX_LEN = 96

_SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": END,
    "dtype": "float32",
}


def qwen2(*, kv_heads: int = 2) -> Qwen2Config:
    """Biases in the attention, an output layer of its own."""
    return Qwen2Config(**_SIZES, num_key_value_heads=kv_heads, tie_word_embeddings=False)


def llama() -> LlamaConfig:
    """No biases, tied embeddings."""
    return LlamaConfig(**_SIZES, num_key_value_heads=2, tie_word_embeddings=True)


_SHARED = {
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 96,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
_HYBRID = {
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "full_attention_interval": 2,
}
_LATENT = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 24,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 48,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
"""vLLM's latent attention on a CPU has these sizes of latents and rotated elements alone."""
_NOAUX = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "num_key_value_heads": 4,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": LLAMA3_ROPE,
    },
    "mistral": {
        "num_key_value_heads": 1,
        "sliding_window": 16,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e3, "factor": 3.0},
    },
    "qwen2": {
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "rope_parameters": YARN,
    },
    "qwen3": {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 32},
    "gpt2": {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": MAX_LEN + 1},  # vLLM asks for one more
    "mixtral": {"num_key_value_heads": 1, "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {
        "num_key_value_heads": 1,
        "head_dim": 32,
        "moe_intermediate_size": 48,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "qwen2_moe": {"num_key_value_heads": 2, **_SHARED},
    "glm4_moe": {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "attention_bias": True,
        "moe_intermediate_size": 48,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5,
    },
    "gpt_oss": {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 64,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "rope_parameters": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    },
    "qwen3_next": {**_HYBRID, **_SHARED},
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": {**_HYBRID, **_SHARED},
    "glm4_moe_lite": {**_LATENT, "q_lora_rank": 40, "rms_norm_eps": 1e-6},
    "deepseek_v2": {
        **_LATENT,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
    },
    "deepseek_v3": {**_LATENT, "q_lora_rank": 40, **_NOAUX, "n_group": 3, "topk_group": 1},
    "gemma3_text": {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 40,
        "tie_word_embeddings": True,
    },
    "phi3": {
        "num_key_value_heads": 2,
        "pad_token_id": None,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e3,
            "short_factor": [1.0 + i / 4 for i in range(8)],
            "long_factor": [2.0 + i for i in range(8)],
            "partial_rotary_factor": 0.5,
        },
        "max_position_embeddings": 256,
        "original_max_position_embeddings": 128,
    },
}
"""By HF's model type, what differs from the common sizes. vLLM's experts on a CPU have channels in multiples of 32."""

ONLY_BFLOAT16 = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""vLLM's kernels of delta nets on a CPU take nothing else (0.32)."""


def family(kind: str, *, dtype: str = "float32", **changes: Any) -> PreTrainedConfig:
    """A family's config: a prime vocabulary, layers that two stages divide unevenly, and changes."""
    common = {name: _SIZES[name] for name in ("initializer_range", "bos_token_id", "eos_token_id")}
    sizes = common if kind == "gpt2" else {**_SIZES, "num_hidden_layers": 3}
    return AutoConfig.for_model(kind, **{**sizes, "vocab_size": 103, **FAMILIES[kind], "dtype": dtype, **changes})


def random_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """A model whose every parameter is random, the biases and norms too."""
    dtype: torch.dtype = getattr(torch, str(config.dtype).removeprefix("torch."))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    zero_centered = config.model_type == "gemma3_text"  # norms multiply by 1 + weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                is_factor = name.endswith("weight") and not zero_centered
                parameter.normal_(1.0 if is_factor else 0.0, 0.1)  # a norm's, or a bias
    return model.to(dtype).eval()


def text_of(ids: Iterable[int]) -> str:
    """The text of ids by the tokenizer of ``save_tokenizer``: a letter each."""
    return "".join(chr(0x4E00 + i) for i in ids)


def save_tokenizer(directory: Path) -> Path:
    """Writes a tokenizer with a letter per id."""
    letters = Tokenizer(WordLevel({text_of([i]): i for i in range(VOCAB)}, unk_token=text_of([2])))
    letters.pre_tokenizer = Split(Regex("."), "isolated")
    letters.decoder = Fuse()
    PreTrainedTokenizerFast(tokenizer_object=letters, eos_token=text_of([END])).save_pretrained(directory)
    return directory


def save(model: PreTrainedModel, directory: Path) -> Path:
    """Writes the model as a Hugging Face directory."""
    model.save_pretrained(directory)
    return directory
