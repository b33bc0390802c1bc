"""gpt-oss: mixtures of experts with biases, and attention with sinks, in windows in every other layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from megarl.models.decoder_tables import QKV, layers_of_type, llama_table, routing
from megarl.models.expert_params import StackedExperts
from megarl.models.hf_config import Family, HFConfigReader, ParamTable
from megarl.models.param_stacks import Names
from megarl.models.param_types import HeadVector, ParamType, Replicated, RowParallel, VocabRows

_SWIGLU_GAIN = 1.702
_SWIGLU_LIMIT = 7.0
_NORM_EPSILON = 1e-5
_ATTENTION: tuple[ParamType, ...] = (
    replace(QKV, vllm="attn.qkv_proj", bias=True),
    HeadVector(Names("self_attn.sinks", "self_attention.core_attention.softmax_offset", "attn.sinks")),
    RowParallel(
        names=Names("self_attn.o_proj", "self_attention.linear_proj", "attn.o_proj"),
        inputs="attention",
        bias=True,
    ),
)
_MIXTURE: tuple[ParamType, ...] = (
    Replicated(names=Names("mlp.router", "mlp.router"), shape=("experts", "hidden")),
    Replicated(names=Names("mlp.router.bias", "mlp.router.bias"), shape=("experts",), bare=True),
    StackedExperts(module="mlp.experts", vllm="mlp.experts.routed_experts."),
)


def _gpt_oss(read: HFConfigReader) -> ParamTable:
    """Returns the parameters of gpt-oss.

    An expert multiplies gate * sigmoid(1.702 gate) by 1 + up, of a gate and an up-projection that are
    clamped.
    """
    read.require("attention_bias", True, only="True, which vLLM's gpt-oss assumes")
    read.require("tie_word_embeddings", False, only="False: vLLM's gpt-oss has an output layer")
    read.require("rms_norm_eps", _NORM_EPSILON, only=f"{_NORM_EPSILON}, which vLLM assumes")
    read.require("swiglu_alpha", _SWIGLU_GAIN, only=f"{_SWIGLU_GAIN}, which vLLM assumes")
    read.require("swiglu_limit", _SWIGLU_LIMIT, only=f"{_SWIGLU_LIMIT}, which vLLM assumes")
    with_window = layers_of_type(read, "sliding_attention", interval="sliding_window_pattern", default=2)
    windows = [layer for layer, has_window in enumerate(with_window) if has_window]
    layers = range(read.positive("num_hidden_layers"))
    if windows != list(layers[::2]):
        read.refuse("layer_types", "is not sliding_attention in every other layer from the first, as vLLM assumes")
    _refuse_other_yarn(read)
    mixtures = dict.fromkeys(layers, _MIXTURE)
    table = llama_table(
        read,
        attention=_ATTENTION,
        experts=mixtures,
        window=read.positive("sliding_window"),
        windows=windows,
        megatron={
            "add_bias_linear": True,
            "softmax_type": "learnable",
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": _SWIGLU_LIMIT,
            **routing(read, mixtures, renormalised=True),
        },
    )
    embedding = Names("model.embed_tokens", "embedding.word_embeddings", "model.embedding")
    return replace(table, embedding=VocabRows(names=embedding))


def _refuse_other_yarn(read: HFConfigReader) -> None:
    """Adds problems for parameters of yarn that vLLM's gpt-oss does not read, or does not do without."""
    field = "rope_parameters" if read.get("rope_parameters") else "rope_scaling"
    stated = read.get(field)
    if not isinstance(stated, Mapping):
        return  # which is refused as another type
    parameters = cast(Mapping[str, Any], stated)
    for name in ("beta_fast", "beta_slow", "factor", "original_max_position_embeddings"):
        if parameters.get(name) is None:
            read.problems.append(f"{field}.{name}: missing, and vLLM assumes nothing; state it")
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        if parameters.get(name) is not None:
            read.problem(f"{field}.{name}", parameters[name], "is not supported: vLLM's gpt-oss does not read it")


GPT_OSS = Family(
    model_type="gpt_oss",
    lm_class="GptOssForCausalLM",
    score_class="GptOssForSequenceClassification",
    describe=_gpt_oss,
    fields={
        "num_experts": ("num_local_experts", "num_experts"),
        "moe_intermediate_size": ("intermediate_size",),
    },
    defaults={
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": _NORM_EPSILON,
        "sliding_window": 128,
    },
    activation="clamped_swiglu",
    rope_types=("yarn",),
    layer_types=("full_attention", "sliding_attention"),
)
