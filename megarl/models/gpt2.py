"""GPT-2: learned positions, LayerNorms, biases everywhere, and matrices that HF stores as [inputs, outputs].

The dropouts in its configs are of its pretraining; here no model drops anything.
"""

from __future__ import annotations

from megarl.models.fused_params import FusedQKV
from megarl.models.hf_config import Family, HFConfigReader, ParamTable
from megarl.models.param_types import ColumnParallel, Matrix, Names, RowParallel, Vector, VocabRows


def _describe(read: HFConfigReader) -> ParamTable:
    read.require("scale_attn_weights", True, only="attention scaled by the root of the head's width")
    read.require("scale_attn_by_inverse_layer_idx", False, only="attention scaled alike in all layers")
    read.require("reorder_and_upcast_attn", False, only="False")
    read.require("add_cross_attention", False, only="decoders without encoders")
    return ParamTable(
        embedding=VocabRows(
            names=Names(hf="transformer.wte", megatron="embedding.word_embeddings", vllm="transformer.wte")
        ),
        positions=Matrix(
            names=Names(hf="transformer.wpe", megatron="embedding.position_embeddings", vllm="transformer.wpe"),
            rows="positions",
        ),
        layer_prefix=Names(hf="transformer.h.{}.", megatron="decoder.layers.{}.", vllm="transformer.h.{}."),
        layer=(
            Vector(names=Names(hf="ln_1", megatron="input_layernorm", vllm="ln_1"), bias=True),
            FusedQKV(
                query="attn.c_attn",
                key="attn.c_attn",
                value="attn.c_attn",
                megatron="self_attention.linear_qkv",
                vllm="attn.c_attn",
                bias=True,
                transposed=True,
            ),
            RowParallel(
                names=Names(hf="attn.c_proj", megatron="self_attention.linear_proj", vllm="attn.c_proj"),
                inputs="attention",
                bias=True,
                transposed=True,
            ),
            Vector(names=Names(hf="ln_2", megatron="pre_mlp_layernorm", vllm="ln_2"), bias=True),
            ColumnParallel(
                names=Names(hf="mlp.c_fc", megatron="mlp.linear_fc1", vllm="mlp.c_fc"),
                outputs="ffn",
                bias=True,
                transposed=True,
            ),
            RowParallel(
                names=Names(hf="mlp.c_proj", megatron="mlp.linear_fc2", vllm="mlp.c_proj"),
                inputs="ffn",
                bias=True,
                transposed=True,
            ),
        ),
        final=(
            Vector(
                names=Names(hf="transformer.ln_f", megatron="decoder.final_layernorm", vllm="transformer.ln_f"),
                bias=True,
            ),
        ),
        output=VocabRows(names=Names(hf="lm_head", megatron="output_layer", vllm="lm_head")),
        score=Matrix(names=Names(hf="score", megatron="output_layer", vllm="score"), rows="one"),
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
    defaults={"hidden_act": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    activation="gelu_tanh",
    rotary=False,
    mlp_ratio=4,
    bare_prefix="transformer.",
    ignored=("*.attn.bias", "*.attn.masked_bias"),
)
