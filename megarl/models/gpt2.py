"""GPT-2: learned positions, LayerNorms, biases everywhere, and matrices that HF stores as [inputs, outputs].

The dropouts in its configs are of pretraining; here no model drops anything.
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
        embedding=VocabRows(names=Names("transformer.wte", "embedding.word_embeddings")),
        positions=Matrix(names=Names("transformer.wpe", "embedding.position_embeddings"), rows="positions"),
        layer_prefix=Names("transformer.h.{}.", "decoder.layers.{}."),
        layer=(
            Vector(names=Names("ln_1", "input_layernorm"), bias=True),
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
                names=Names("attn.c_proj", "self_attention.linear_proj"), inputs="attention", bias=True, transposed=True
            ),
            Vector(names=Names("ln_2", "pre_mlp_layernorm"), bias=True),
            ColumnParallel(names=Names("mlp.c_fc", "mlp.linear_fc1"), outputs="ffn", bias=True, transposed=True),
            RowParallel(names=Names("mlp.c_proj", "mlp.linear_fc2"), inputs="ffn", bias=True, transposed=True),
        ),
        final=(Vector(names=Names("transformer.ln_f", "decoder.final_layernorm"), bias=True),),
        output=VocabRows(names=Names("lm_head", "output_layer")),
        score=Matrix(names=Names("score", "output_layer"), rows="one"),
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
