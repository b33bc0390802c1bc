"""GLM-4.5 to 4.7, and GLM-4.7-Flash, whose attention is latent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megarl.models.decoder_tables import (
    EXPERTS,
    HEAD_NORMS,
    SHARED_EXPERTS,
    SIGMOID_ROUTER,
    full_attention,
    llama_table,
    mixture_layers,
    mtp_tensors,
    sigmoid_routing,
)
from megarl.models.deepseek import DEEPSEEK_V3, latent_table
from megarl.models.hf_config import Family, HFConfigReader, ParamTable


def _require_sigmoid_routing(read: HFConfigReader) -> None:
    """Refuses other routers, which neither transformers nor vLLM has for these families."""
    read.require("scoring_func", "sigmoid", only="sigmoid")
    read.require("topk_method", "noaux_tc", only="noaux_tc: a bias chooses")


def _glm4_moe(read: HFConfigReader) -> ParamTable:
    _require_sigmoid_routing(read)
    params = (*SIGMOID_ROUTER, EXPERTS, *SHARED_EXPERTS)
    mixtures = dict.fromkeys(mixture_layers(read), params)
    read.require("tie_word_embeddings", False, only="False: vLLM's GLM-4.5 has an output layer")
    read.require("sliding_window", only="full attention, which transformers assumes")
    if read.get("partial_rotary_factor") is None:
        read.problem("partial_rotary_factor", None, "is not a share; vLLM and transformers take others for it")
    if read.get("head_dim") is None:
        read.problem("head_dim", None, "is not a width, which vLLM's GLM-4.5 asks for")
    if read.dtype() == "float16" and read.number("routed_scaling_factor") != 1:
        # It divides the shared expert's output by the factor, and nothing multiplies it again (0.32).
        read.refuse("routed_scaling_factor", "is wrong in vLLM in float16")
    normed = read.flag("use_qk_norm")
    return llama_table(
        read,
        attention=full_attention(head_norms=HEAD_NORMS if normed else (), bias=read.flag("attention_bias")),
        experts=mixtures,
        untrained=mtp_tensors(read),
        megatron={"qk_layernorm": normed, **sigmoid_routing(read, mixtures)},
    )


GLM4_MOE = Family(
    model_type="glm4_moe",
    lm_class="Glm4MoeForCausalLM",
    score_class="Glm4MoeForSequenceClassification",  # which transformers 5.19 lacks
    describe=_glm4_moe,
    fields={
        "num_experts": ("n_routed_experts", "num_local_experts"),
        "num_nextn_predict_layers": ("num_nextn_predict_layers", "num_mtp_layers"),
    },
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 1408,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
    },
    partial_rotary=True,
    shared_expert="plain",
)


def _glm4_moe_lite(read: HFConfigReader) -> ParamTable:
    layers = read.positive("num_hidden_layers")
    dense = read.positive("first_k_dense_replace")
    # transformers reads these, and takes one dense layer without them; vLLM reads first_k_dense_replace.
    kinds: Any = read.get("mlp_layer_types")
    if kinds is None:
        kinds = ["dense", *["sparse"] * (layers - 1)]
    if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        read.problem("mlp_layer_types", kinds, f"are not {dense} dense ones, and sparse ones after them")
    _require_sigmoid_routing(read)
    mixtures = dict.fromkeys(mixture_layers(read), (*SIGMOID_ROUTER, EXPERTS, *SHARED_EXPERTS))
    return latent_table(read, mixtures, sigmoid_routing(read, mixtures), mtp_tensors(read))


GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    lm_class="Glm4MoeLiteForCausalLM",
    score_class="Glm4MoeLiteForSequenceClassification",  # which transformers 5.19 lacks
    describe=_glm4_moe_lite,
    defaults={
        **DEEPSEEK_V3.defaults,
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1536,
        "num_experts": 64,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "first_k_dense_replace": None,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
    },
)
