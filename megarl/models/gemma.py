"""Gemma 3's language models."""

from __future__ import annotations

import math

from megarl.models.decoder_tables import HEAD_NORMS, full_attention, layers_of_type, llama_table
from megarl.models.hf_config import Family, HFConfigReader, ParamTable


def _gemma3(read: HFConfigReader) -> ParamTable:
    """Returns the parameters of Gemma 3.

    Of six layers, five see a window of positions, with rotary embeddings of their own. Norms multiply
    by 1 + weight and follow attention and MLP as well.
    """
    read.require("attention_bias", False, only="False")
    read.require("use_bidirectional_attention", False, only="causal decoders")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        read.require(name, only="logits without a cap")
    read.require("hidden_act", "gelu_pytorch_tanh", only="gelu_pytorch_tanh, which vLLM has")
    if "sliding_window_pattern" in read.config and read.get("layer_types") is None:
        read.positive("sliding_window_pattern")  # where it is null, transformers computes nothing
    with_window = layers_of_type(read, "sliding_attention", interval="sliding_window_pattern", default=6)
    return llama_table(
        read,
        attention=full_attention(head_norms=HEAD_NORMS),
        window=read.positive("sliding_window"),
        windows=[layer for layer, has_window in enumerate(with_window) if has_window],
        post_norms=True,
        embedding_scale=math.sqrt(read.positive("hidden_size")),
        megatron={
            "qk_layernorm": True,
            "layernorm_zero_centered_gamma": True,
            "softmax_scale": read.positive("query_pre_attn_scalar") ** -0.5,
        },
    )


GEMMA3 = Family(
    model_type="gemma3_text",
    lm_class="Gemma3ForCausalLM",
    score_class="Gemma3TextForSequenceClassification",
    describe=_gemma3,
    fields={"hidden_act": ("hidden_activation",)},
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    activation="gelu_tanh",
    rope_types=("default", "linear"),
    has_local_rope=True,
    layer_types=("full_attention", "sliding_attention"),
)
