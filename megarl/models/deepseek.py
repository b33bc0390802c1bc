"""Families with multi-head latent attention (MLA): DeepSeek V2 and V3, Moonlight, GLM-4.7-Flash."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from megarl.models.decoder_tables import (
    EXPERTS,
    SHARED_EXPERTS,
    SIGMOID_ROUTER,
    llama_table,
    mixture,
    mixture_layers,
    mtp_tensors,
    routing,
    sigmoid_routing,
)
from megarl.models.hf_config import Family, HFConfigReader, ParamTable
from megarl.models.param_stacks import Names
from megarl.models.param_types import ColumnParallel, LatentDown, ParamType, Replicated, RowParallel, SharedLinear

_QUERY_DOWN = Names("self_attn.q_a_proj", "self_attention.linear_q_down_proj")
_LATENT_DOWN = Names("self_attn.kv_a_proj_with_mqa", "self_attention.linear_kv_down_proj")
_DIRECT_QUERIES: tuple[ParamType, ...] = (
    ColumnParallel(
        hf=("self_attn.q_proj",),
        megatron="self_attention.linear_q_proj",
        vllm="self_attn.q_proj",
        outputs="attention",
    ),
    SharedLinear(names=_LATENT_DOWN, shape=("latent_and_rotated", "hidden")),
)
_LATENT_QUERIES: tuple[ParamType, ...] = (
    LatentDown(queries=_QUERY_DOWN, latent=_LATENT_DOWN, vllm="self_attn.fused_qkv_a_proj"),
    Replicated(names=Names("self_attn.q_a_layernorm", "self_attention.q_layernorm"), shape=("latent_queries",)),
    ColumnParallel(
        hf=("self_attn.q_b_proj",),
        megatron="self_attention.linear_q_up_proj",
        vllm="self_attn.q_b_proj",
        outputs="attention",
        inputs="latent_queries",
    ),
)
_KEYS_AND_VALUES: tuple[ParamType, ...] = (
    Replicated(names=Names("self_attn.kv_a_layernorm", "self_attention.kv_layernorm"), shape=("latent",)),
    ColumnParallel(
        hf=("self_attn.kv_b_proj",),
        megatron="self_attention.linear_kv_up_proj",
        vllm="self_attn.kv_b_proj",
        outputs="expanded_latent",
        inputs="latent",
    ),
    RowParallel(names=Names("self_attn.o_proj", "self_attention.linear_proj"), inputs="values"),
)


def latent_table(
    read: HFConfigReader,
    mixtures: Mapping[int, tuple[ParamType, ...]],
    fields: Mapping[str, Any],
    untrained: tuple[str, ...] = (),
) -> ParamTable:
    """Returns the parameters of a decoder with latent attention.

    Args:
        mixtures: router and experts of the layers that have them.
        fields: their fields of ``TransformerConfig``.
    """
    read.require("attention_bias", False, only="False: vLLM's latent attention has no biases")
    read.require("mlp_bias", False, only="False")
    read.require("sliding_window", only="full attention, which transformers assumes")
    if not read.flag("rope_interleave"):
        read.refuse("rope_interleave", "is not true: vLLM rotates pairs of neighbors")
    if "index_topk" in read.config:
        read.refuse("index_topk", "is stated, for which vLLM has sparse attention")
    factor = read.number("routed_scaling_factor")
    if read.dtype() == "float16" and factor != 1:
        # It divides the shared expert's output by the factor (0.32).
        read.refuse("routed_scaling_factor", "is wrong in vLLM in float16")
    heads = read.positive("num_attention_heads")
    if read.positive("num_key_value_heads", heads) != heads:
        read.refuse("num_key_value_heads", f"is not {heads}, the number of heads")
    queries = _DIRECT_QUERIES if read.get("q_lora_rank") is None else _LATENT_QUERIES
    width = read.positive("qk_nope_head_dim") + read.positive("qk_rope_head_dim")
    read.require("head_dim", read.positive("qk_rope_head_dim"), only="qk_rope_head_dim: transformers rotates as many")
    if read.positive("v_head_dim") > width:
        read.refuse("v_head_dim", f"is more than {width}, the width of keys")
    return llama_table(
        read,
        attention=(*queries, *_KEYS_AND_VALUES),
        experts=mixtures,
        untrained=untrained,
        megatron={**fields, "softmax_scale": width**-0.5 * _yarn_scale(read)},
    )


def _yarn_scale(read: HFConfigReader) -> float:
    """Returns yarn's factor of attention scores: the square of its scale for ``mscale_all_dim``."""
    found: Any = read.get("rope_parameters") or read.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        return 1.0
    stated = cast(Mapping[str, Any], found)
    kind = stated.get("rope_type") or stated.get("type") or "default"
    factor: Any = stated.get("factor")
    if kind != "yarn" or type(factor) not in (int, float):
        return 1.0
    for name in ("attention_factor", "truncate"):
        if stated.get(name) is not None:
            read.problem(f"rope_parameters.{name}", stated[name], "is not read by vLLM's latent attention")
    mscale: Any = stated.get("mscale") or 0
    scale: Any = stated.get("mscale_all_dim") or 0
    for name, value in (("mscale", mscale), ("mscale_all_dim", scale)):
        if type(value) not in (int, float):
            read.problem(f"rope_parameters.{name}", value, "is not a number")
            return 1.0
    if bool(mscale) != bool(scale) and (mscale, scale) != (1, 0):
        rule = "alone has other meanings in transformers and vLLM: state mscale and mscale_all_dim, or neither"
        read.problem("rope_parameters.mscale", (mscale, scale), rule)
    if factor <= 1:
        return 1.0
    return (0.1 * scale * math.log(factor) + 1.0) ** 2


def _deepseek_v3(read: HFConfigReader) -> ParamTable:
    read.require("topk_method", "noaux_tc", only="noaux_tc: a bias chooses")
    read.require("scoring_func", "sigmoid", only="sigmoid, which transformers assumes")
    if read.get("topk_method") is None or read.get("scoring_func") is None:
        rule = (
            "is missing, and vLLM then takes softmax, and no bias; state topk_method noaux_tc and scoring_func sigmoid"
        )
        read.problem("topk_method, scoring_func", (read.get("topk_method"), read.get("scoring_func")), rule)
    # vLLM's weight is in the model's dtype, unlike that of GLM.
    router = (replace(SIGMOID_ROUTER[0], vllm_dtype=None), SIGMOID_ROUTER[1])
    mixtures = dict.fromkeys(mixture_layers(read), (*router, EXPERTS, *SHARED_EXPERTS))
    return latent_table(read, mixtures, sigmoid_routing(read, mixtures), mtp_tensors(read))


def _deepseek_v2(read: HFConfigReader) -> ParamTable:
    read.require("topk_method", "greedy", only="greedy: experts without groups")
    read.require("scoring_func", "softmax", only="softmax, which transformers assumes")
    read.require("norm_topk_prob", False, only="False, as transformers has it")
    for name in ("n_group", "topk_group"):
        if read.get(name) != 1:
            read.refuse(name, "is not 1, for experts without groups; vLLM has no default")
    layers = mixture_layers(read)
    mixtures = dict.fromkeys(layers, (*mixture("mlp.gate", EXPERTS), *SHARED_EXPERTS))
    fields = routing(read, layers, renormalised=False)
    fields["moe_router_dtype"] = "fp32"
    fields["moe_router_topk_scaling_factor"] = read.number("routed_scaling_factor")
    return latent_table(read, mixtures, fields)


DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    lm_class="DeepseekV3ForCausalLM",
    score_class="DeepseekV3ForSequenceClassification",
    describe=_deepseek_v3,
    fields={
        "num_experts": ("n_routed_experts", "num_local_experts"),
        "num_nextn_predict_layers": ("num_nextn_predict_layers", "num_mtp_layers"),
    },
    defaults={
        "rms_norm_eps": 1e-6,
        "moe_intermediate_size": 2048,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "rope_interleave": True,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
    rope_types=("default", "yarn"),
    shared_expert="plain",
    latent=True,
)
DEEPSEEK_V2 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v2",
    lm_class="DeepseekV2ForCausalLM",
    score_class="DeepseekV2ForSequenceClassification",
    describe=_deepseek_v2,
    defaults={
        **DEEPSEEK_V3.defaults,
        "moe_intermediate_size": 1407,
        "num_experts": 64,
        "num_experts_per_tok": None,
        "n_shared_experts": 2,
        "n_group": None,
        "topk_group": None,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
    },
)
