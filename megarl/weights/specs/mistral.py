"""Mistral: Llama's tensors; only checkpoints without a sliding window."""

from __future__ import annotations

from megarl.weights.specs.family import Family, Table
from megarl.weights.specs.llama import llama_table
from megarl.weights.specs.reading import Reader


def _describe(read: Reader) -> Table:
    read.require("sliding_window", only="null: full attention")
    read.require("llama_4_scaling", only="attention that positions do not scale")
    return llama_table(read)


MISTRAL = Family(
    model_type="mistral",
    lm_class="MistralForCausalLM",
    score_class="MistralForSequenceClassification",
    describe=_describe,
    defaults={
        "hidden_act": "silu",
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
    },
)
