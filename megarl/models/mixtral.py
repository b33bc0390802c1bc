"""Mixtures of experts: Mixtral and Qwen3-MoE."""

from __future__ import annotations

from typing import Any

from megarl.models.fused_params import Experts
from megarl.models.hf_config import Family, HFConfigReader, ParamTable
from megarl.models.llama_like import HEAD_NORMS, llama_table, refuse_uncommon_attention
from megarl.models.param_types import Names, ParamType, Replicated


def routing(read: HFConfigReader, *, renormalised: bool) -> dict[str, Any]:
    """Returns the router's fields of ``TransformerConfig``; ``renormalised``: the chosen experts' weights sum to 1."""
    chosen = read.positive("num_experts_per_tok")
    experts = read.positive("num_experts")
    if chosen > experts:
        read.problems.append(f"num_experts_per_tok: {chosen} exceeds the {experts} experts")
    if chosen == 1 and renormalised:
        read.problems.append("num_experts_per_tok: 1 is not supported where weights sum to 1 (Megatron refuses it)")
    return {
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": read.positive("intermediate_size"),
        "moe_router_topk": chosen,
        "moe_router_pre_softmax": not renormalised,
    }


def _moe(router: str, experts: Experts) -> tuple[ParamType, ...]:
    return Replicated(names=Names(router, "mlp.router"), shape=("experts", "hidden")), experts


def _mixtral(read: HFConfigReader) -> ParamTable:
    read.require("sliding_window", only="full attention")
    read.require("router_jitter_noise", 0, only="0: routing without noise")
    mlp = _moe("block_sparse_moe.gate", Experts(module="block_sparse_moe.experts", gate="w1", up="w3", down="w2"))
    return llama_table(read, mlp=mlp, megatron=routing(read, renormalised=True))


MIXTRAL = Family(
    model_type="mixtral",
    lm_class="MixtralForCausalLM",
    score_class="MixtralForSequenceClassification",
    describe=_mixtral,
    fields={"num_experts": ("num_local_experts",)},
    defaults={
        "hidden_act": "silu",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
    },
)


def _qwen3_moe(read: HFConfigReader) -> ParamTable:
    refuse_uncommon_attention(read)
    read.require("mlp_only_layers", [], only="experts in every layer")
    read.require("decoder_sparse_step", 1, only="experts in every layer")
    read.require("shared_expert_intermediate_size", 0, only="routed experts")
    mlp = _moe("mlp.gate", Experts(module="mlp.experts", gate="gate_proj", up="up_proj", down="down_proj"))
    megatron = {"qk_layernorm": True, **routing(read, renormalised=read.flag("norm_topk_prob"))}
    return llama_table(read, head_norms=HEAD_NORMS, mlp=mlp, megatron=megatron)


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    lm_class="Qwen3MoeForCausalLM",
    score_class="Qwen3MoeForSequenceClassification",
    describe=_qwen3_moe,
    fields={"intermediate_size": ("moe_intermediate_size",), "num_experts": ("num_experts", "num_local_experts")},
    defaults={
        "hidden_act": "silu",
        "intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
    },
)
