"""GPT-2: learned positions, LayerNorms, biases everywhere, and matrices that HF stores as [inputs, outputs].

The dropouts in its configs belong to pretraining and are not applied.
"""

from __future__ import annotations

from megarl.models.hf_config import Family, HFConfigReader, ParamTable
from megarl.models.param_types import ColumnParallel, FusedQKV, Names, Replicated, RowParallel, VocabRows


def _describe(read: HFConfigReader) -> ParamTable:
    read.require("scale_attn_weights", True, only="attention scaled by the root of the head's width")
    read.require("scale_attn_by_inverse_layer_idx", False, only="attention scaled alike in all layers")
    read.require("reorder_and_upcast_attn", False, only="False")
    read.require("add_cross_attention", False, only="decoders without encoders")
    attention_output = Names("attn.c_proj", "self_attention.linear_proj")
    return ParamTable(
        embedding=VocabRows(names=Names("transformer.wte", "embedding.word_embeddings")),
        positions=Replicated(
            names=Names("transformer.wpe", "embedding.position_embeddings"), shape=("positions", "hidden")
        ),
        layer_prefix=Names("transformer.h.{}.", "decoder.layers.{}."),
        layer=(
            Replicated(names=Names("ln_1", "input_layernorm"), bias=True),
            FusedQKV(
                hf=("attn.c_attn", "attn.c_attn", "attn.c_attn"),
                megatron="self_attention.linear_qkv",
                vllm="attn.c_attn",
                bias=True,
                transposed=True,
            ),
            RowParallel(names=attention_output, inputs="attention", bias=True, transposed=True),
            Replicated(names=Names("ln_2", "pre_mlp_layernorm"), bias=True),
            ColumnParallel(
                hf=("mlp.c_fc",), megatron="mlp.linear_fc1", vllm="mlp.c_fc", outputs="ffn", bias=True, transposed=True
            ),
            RowParallel(names=Names("mlp.c_proj", "mlp.linear_fc2"), inputs="ffn", bias=True, transposed=True),
        ),
        final=(Replicated(names=Names("transformer.ln_f", "decoder.final_layernorm"), bias=True),),
        megatron={
            "normalization": "LayerNorm",
            "layernorm_epsilon": read.number("layer_norm_epsilon"),
            "gated_linear_unit": False,
            "add_qkv_bias": True,
            "add_bias_linear": True,
        },
    )


GPT2 = Family(
    model_type="gpt2",
    lm_class="GPT2LMHeadModel",
    score_class="GPT2ForSequenceClassification",
    describe=_describe,
    fields={
        "hidden_size": ("n_embd",),
        "intermediate_size": ("n_inner",),
        "num_hidden_layers": ("n_layer",),
        "num_attention_heads": ("n_head",),
        "max_position_embeddings": ("n_positions",),
        "hidden_act": ("activation_function",),
    },
    defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    activation="gelu_tanh",
    rotary=False,
    mlp_ratio=4,
    bare_prefix="transformer.",
    ignored=("*.attn.bias", "*.attn.masked_bias"),
)
