"""Phi-3 and Phi-4: Llama's tensors, with queries, keys and values in one, and gates with up-projections in another."""

from __future__ import annotations

from megarl.weights.specs.blocks import FusedGateUp, FusedQKV
from megarl.weights.specs.family import Family, Table
from megarl.weights.specs.llama import MLP_DOWN, llama_table
from megarl.weights.specs.reading import Reader

_QKV = FusedQKV(
    query="self_attn.qkv_proj",
    key="self_attn.qkv_proj",
    value="self_attn.qkv_proj",
    megatron="self_attention.linear_qkv",
    vllm="self_attn.qkv_proj",
)
_GATE_UP = FusedGateUp(
    gate="mlp.gate_up_proj", up="mlp.gate_up_proj", megatron="mlp.linear_fc1", vllm="mlp.gate_up_proj"
)


def _describe(read: Reader) -> Table:
    read.require("sliding_window", only="full attention")
    for name in ("embd_pdrop", "resid_pdrop"):
        read.require(name, 0, only="0: trainer and engine must agree without randomness")
    return llama_table(read, qkv=_QKV, mlp=(_GATE_UP, MLP_DOWN))


PHI3 = Family(
    model_type="phi3",
    lm_class="Phi3ForCausalLM",
    score_class="Phi3ForSequenceClassification",
    describe=_describe,
    defaults={"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0},
)
