"""Qwen3's mixtures of experts: Qwen3's attention, and a router with experts in the place of every MLP."""

from __future__ import annotations

from megarl.weights.specs.blocks import Experts
from megarl.weights.specs.elements import Element, Matrix, Names
from megarl.weights.specs.family import Family, Table
from megarl.weights.specs.llama import llama_table
from megarl.weights.specs.qwen3 import HEAD_NORMS, refuse_uncommon_attention
from megarl.weights.specs.reading import Reader
from megarl.weights.specs.routing import routing

_MOE: tuple[Element, ...] = (
    Matrix(names=Names(hf="mlp.gate", megatron="mlp.router", vllm="mlp.gate"), rows="experts"),
    Experts(
        gate="mlp.experts.{}.gate_proj",
        up="mlp.experts.{}.up_proj",
        down="mlp.experts.{}.down_proj",
        vllm="mlp.experts.routed_experts",
    ),
)


def _describe(read: Reader) -> Table:
    refuse_uncommon_attention(read)
    read.require("mlp_only_layers", [], only="experts in every layer")
    read.require("decoder_sparse_step", 1, only="experts in every layer")
    read.require("shared_expert_intermediate_size", 0, only="routed experts")
    moe = routing(read, renormalised=bool(read.get("norm_topk_prob")))
    return llama_table(read, head_norms=HEAD_NORMS, mlp=_MOE, megatron={"qk_layernorm": True, **moe})


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    lm_class="Qwen3MoeForCausalLM",
    score_class="Qwen3MoeForSequenceClassification",
    describe=_describe,
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
