"""Mixtral: Llama's attention, and a router with experts in the place of the MLP."""

from __future__ import annotations

from megarl.weights.specs.blocks import Experts
from megarl.weights.specs.elements import Element, Matrix, Names
from megarl.weights.specs.family import Family, Table
from megarl.weights.specs.llama import llama_table
from megarl.weights.specs.reading import Reader
from megarl.weights.specs.routing import routing

_MOE: tuple[Element, ...] = (
    Matrix(
        names=Names(hf="block_sparse_moe.gate", megatron="mlp.router", vllm="block_sparse_moe.gate"), rows="experts"
    ),
    Experts(
        gate="block_sparse_moe.experts.{}.w1",
        up="block_sparse_moe.experts.{}.w3",
        down="block_sparse_moe.experts.{}.w2",
        vllm="block_sparse_moe.experts.routed_experts",
    ),
)


def _describe(read: Reader) -> Table:
    read.require("sliding_window", only="full attention")
    read.require("router_jitter_noise", 0, only="0: routing without noise")
    return llama_table(read, mlp=_MOE, megatron=routing(read, renormalised=True))


MIXTRAL = Family(
    model_type="mixtral",
    lm_class="MixtralForCausalLM",
    score_class="MixtralForSequenceClassification",
    describe=_describe,
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
