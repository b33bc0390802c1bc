"""The model families: decoders with Llama's tensors, with experts, and GPT-2.

GPT-2 has learned positions, LayerNorms, biases everywhere, and matrices that HF stores as [inputs,
outputs]. The dropouts in its configs belong to pretraining and are not applied.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, cast

from megarl.models.hf_config import Family, HFConfigReader, LayerSpec, ParamTable
from megarl.models.param_types import (
    ColumnParallel,
    Experts,
    FusedQKV,
    Names,
    ParamType,
    Replicated,
    RowParallel,
    VocabRows,
)

QKV = FusedQKV(
    hf=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    megatron="self_attention.linear_qkv",
    vllm="self_attn.qkv_proj",
)
GATE_UP = ColumnParallel(hf=("mlp.gate_proj", "mlp.up_proj"), megatron="mlp.linear_fc1", vllm="mlp.gate_up_proj")
DOWN = RowParallel(names=Names("mlp.down_proj", "mlp.linear_fc2"), inputs="ffn")


def llama_table(
    read: HFConfigReader,
    *,
    qkv: FusedQKV = QKV,
    head_norms: tuple[ParamType, ...] = (),
    mlp: tuple[ParamType, ...] = (GATE_UP, DOWN),
    experts: Mapping[int, tuple[ParamType, ...]] | None = None,
    output_bias: bool = False,
    window: int | None = None,
    megatron: Mapping[str, Any] | None = None,
) -> ParamTable:
    """Returns Llama's parameters, with what differs in other families.

    Args:
        head_norms: norms of each head's query and key.
        mlp: the MLP.
        experts: router and experts of the layers that have them in place of the MLP.
        output_bias: whether the attention's output projection has a bias.
        window: last positions, its own included, that each one sees; None: all.
        megatron: additional fields of ``TransformerConfig``.
    """
    attention_output = Names("self_attn.o_proj", "self_attention.linear_proj")
    attention = (
        Replicated(names=Names("input_layernorm", "input_layernorm")),
        qkv,
        *head_norms,
        RowParallel(names=attention_output, inputs="attention", bias=output_bias),
        Replicated(names=Names("post_attention_layernorm", "pre_mlp_layernorm")),
    )
    mixtures = experts or {}
    layers: list[LayerSpec] = []
    for layer in range(read.positive("num_hidden_layers")):
        layers.append(LayerSpec((*attention, *mixtures.get(layer, mlp))))
    return ParamTable(
        embedding=VocabRows(names=Names("model.embed_tokens", "embedding.word_embeddings")),
        layer_prefix=Names("model.layers.{}.", "decoder.layers.{}."),
        layers=tuple(layers),
        final=(Replicated(names=Names("model.norm", "decoder.final_layernorm")),),
        megatron={
            "normalization": "RMSNorm",
            "layernorm_epsilon": read.number("rms_norm_eps"),
            "gated_linear_unit": True,
            "add_qkv_bias": qkv.bias,
            "add_bias_linear": False,
            "window_size": None if window is None else (window - 1, 0),
            **(megatron or {}),
        },
    )


def _llama(read: HFConfigReader) -> ParamTable:
    biased = read.flag("attention_bias")
    if biased != read.flag("mlp_bias"):
        read.problems.append(
            "attention_bias, mlp_bias: only both or neither is supported (Megatron has one switch for both)"
        )
    for name in ("bias", "qkv_bias"):
        read.require(name, False, only="attention_bias with mlp_bias")
    read.require("sliding_window", only="full attention")
    return llama_table(
        read,
        qkv=replace(QKV, bias=biased),
        mlp=(replace(GATE_UP, bias=biased), replace(DOWN, bias=biased)),
        output_bias=biased,
        megatron={"add_bias_linear": biased},
    )


LLAMA = Family(
    model_type="llama",
    lm_class="LlamaForCausalLM",
    score_class="LlamaForSequenceClassification",
    describe=_llama,
    defaults={"rms_norm_eps": 1e-6, "rope_theta": 10000.0},
)


def _mistral(read: HFConfigReader) -> ParamTable:
    read.require("llama_4_scaling", only="attention that positions do not scale")
    return llama_table(read, window=read.window())


MISTRAL = Family(
    model_type="mistral",
    lm_class="MistralForCausalLM",
    score_class="MistralForSequenceClassification",
    describe=_mistral,
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
    },
)


def _phi3(read: HFConfigReader) -> ParamTable:
    for name in ("embd_pdrop", "resid_pdrop"):
        read.require(name, 0, only="0: trainer and engine must agree without randomness")
    # HF fuses as vLLM does.
    qkv = replace(QKV, hf=(QKV.vllm,) * 3)
    gate_up = replace(GATE_UP, hf=(GATE_UP.vllm,) * 2)
    return llama_table(read, qkv=qkv, mlp=(gate_up, DOWN), window=read.window())


PHI3 = Family(
    model_type="phi3",
    lm_class="Phi3ForCausalLM",
    score_class="Phi3ForSequenceClassification",
    describe=_phi3,
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "original_max_position_embeddings": 4096},
    partial_rotary=True,
    rope_types=("default", "longrope"),
)


def _qwen2(read: HFConfigReader) -> ParamTable:
    read.require("use_sliding_window", False, only="full attention")
    read.require("qk_norm", False, only="queries and keys without norms")
    read.require("dual_chunk_attention_config", only="attention over the whole sequence")
    hidden = read.positive("hidden_size")
    heads = read.positive("num_attention_heads")
    head_dim = read.positive("head_dim", hidden // heads)
    if read.get("head_dim") is not None and head_dim * heads != hidden:
        read.problems.append(
            f"head_dim: {head_dim} is not hidden_size / num_attention_heads, which vLLM's Qwen2 assumes"
        )
    return llama_table(read, qkv=replace(QKV, bias=True))


QWEN2 = Family(
    model_type="qwen2",
    lm_class="Qwen2ForCausalLM",
    score_class="Qwen2ForSequenceClassification",
    describe=_qwen2,
    defaults={"rms_norm_eps": 1e-6},
)


HEAD_NORMS: tuple[ParamType, ...] = tuple(
    Replicated(names=Names(f"self_attn.{of}_norm", f"self_attention.{of}_layernorm"), shape=("head",))
    for of in ("q", "k")
)


def refuse_uncommon_attention(read: HFConfigReader) -> None:
    """Adds problems for what neither Qwen3 nor Qwen3-MoE supports."""
    read.require("attention_bias", False, only="False: vLLM's Qwen3 has no bias on o_proj")
    read.require("use_sliding_window", False, only="full attention")
    read.require("dual_chunk_attention_config", only="attention over the whole sequence")


def _qwen3(read: HFConfigReader) -> ParamTable:
    refuse_uncommon_attention(read)
    return llama_table(read, head_norms=HEAD_NORMS, megatron={"qk_layernorm": True})


QWEN3 = Family(
    model_type="qwen3",
    lm_class="Qwen3ForCausalLM",
    score_class="Qwen3ForSequenceClassification",
    describe=_qwen3,
    defaults={"head_dim": 128, "num_key_value_heads": 32, "rms_norm_eps": 1e-6},
)


def routing(read: HFConfigReader, mixtures: Collection[int], *, renormalised: bool) -> dict[str, Any]:
    """Returns the router's fields of ``TransformerConfig``.

    Args:
        mixtures: layers with experts.
        renormalised: whether the weights of the chosen experts sum to 1.
    """
    chosen = read.positive("num_experts_per_tok")
    experts = read.positive("num_experts")
    if chosen > experts:
        read.problems.append(f"num_experts_per_tok: {chosen} exceeds the {experts} experts")
    if chosen == 1 and renormalised:
        read.problems.append("num_experts_per_tok: 1 is not supported where weights sum to 1 (Megatron refuses it)")
    layers = range(read.positive("num_hidden_layers"))
    sparse: dict[str, Any] = {}
    if len(mixtures) < len(layers):
        sparse["moe_layer_freq"] = [int(layer in mixtures) for layer in layers]
    return {
        **sparse,
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": read.positive("moe_intermediate_size"),
        "moe_router_topk": chosen,
        "moe_router_pre_softmax": not renormalised,
    }


def _moe(router: str, experts: Experts) -> tuple[ParamType, ...]:
    return Replicated(names=Names(router, "mlp.router"), shape=("experts", "hidden")), experts


def _mixtral(read: HFConfigReader) -> ParamTable:
    read.require("router_jitter_noise", 0, only="0: routing without noise")
    mlp = _moe("block_sparse_moe.gate", Experts(module="block_sparse_moe.experts", gate="w1", up="w3", down="w2"))
    mixtures = dict.fromkeys(range(read.positive("num_hidden_layers")), mlp)
    megatron = routing(read, mixtures, renormalised=True)
    return llama_table(read, experts=mixtures, window=read.window(), megatron=megatron)


MIXTRAL = Family(
    model_type="mixtral",
    lm_class="MixtralForCausalLM",
    score_class="MixtralForSequenceClassification",
    describe=_mixtral,
    fields={"num_experts": ("num_local_experts",), "moe_intermediate_size": ("intermediate_size",)},
    defaults={
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
    },
)


def sparse_layers(read: HFConfigReader) -> list[int]:
    """Returns the layers with experts, of Qwen's mixtures: every ``decoder_sparse_step``-th, but for exceptions."""
    layers = read.positive("num_hidden_layers")
    step = read.positive("decoder_sparse_step", 1)
    stated: Any = read.get("mlp_only_layers") or []
    exceptions: list[Any] = []
    if isinstance(stated, list):
        exceptions = cast(list[Any], stated)
    if not isinstance(stated, list) or any(type(layer) is not int for layer in exceptions):
        read.problem("mlp_only_layers", cast(object, stated), "is not a list of layers")
    found: list[int] = []
    for layer in range(layers):
        if (layer + 1) % step == 0 and layer not in exceptions:
            found.append(layer)
    if not found:
        read.problem("mlp_only_layers, decoder_sparse_step", (exceptions, step), "leave no layer with experts")
    return found


def _qwen3_moe(read: HFConfigReader) -> ParamTable:
    refuse_uncommon_attention(read)
    read.require("shared_expert_intermediate_size", 0, only="routed experts")
    mlp = _moe("mlp.gate", Experts(module="mlp.experts", gate="gate_proj", up="up_proj", down="down_proj"))
    mixtures = dict.fromkeys(sparse_layers(read), mlp)
    megatron = {"qk_layernorm": True, **routing(read, mixtures, renormalised=read.flag("norm_topk_prob"))}
    return llama_table(read, head_norms=HEAD_NORMS, experts=mixtures, megatron=megatron)


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    lm_class="Qwen3MoeForCausalLM",
    score_class="Qwen3MoeForSequenceClassification",
    describe=_qwen3_moe,
    fields={"num_experts": ("num_experts", "num_local_experts")},
    defaults={
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
    },
)


def _gpt2(read: HFConfigReader) -> ParamTable:
    read.require("scale_attn_weights", True, only="attention scaled by the root of the head's width")
    read.require("scale_attn_by_inverse_layer_idx", False, only="attention scaled alike in all layers")
    read.require("reorder_and_upcast_attn", False, only="False")
    read.require("add_cross_attention", False, only="decoders without encoders")
    attention_output = Names("attn.c_proj", "self_attention.linear_proj")
    layer = LayerSpec(
        (
            Replicated(names=Names("ln_1", "input_layernorm"), bias=True),
            FusedQKV(
                hf=("attn.c_attn", "attn.c_attn", "attn.c_attn"),
                megatron="self_attention.linear_qkv",
                vllm="attn.c_attn",
                bias=True,
                transposed=True,
            ),
            RowParallel(names=attention_output, inputs="attention", bias=True, transposed=True),
            Replicated(names=Names("ln_2", "pre_mlp_layernorm"), bias=True),
            ColumnParallel(hf=("mlp.c_fc",), megatron="mlp.linear_fc1", vllm="mlp.c_fc", bias=True, transposed=True),
            RowParallel(names=Names("mlp.c_proj", "mlp.linear_fc2"), inputs="ffn", bias=True, transposed=True),
        )
    )
    return ParamTable(
        embedding=VocabRows(names=Names("transformer.wte", "embedding.word_embeddings")),
        positions=Replicated(
            names=Names("transformer.wpe", "embedding.position_embeddings"), shape=("positions", "hidden")
        ),
        layer_prefix=Names("transformer.h.{}.", "decoder.layers.{}."),
        layers=(layer,) * read.positive("num_hidden_layers"),
        final=(Replicated(names=Names("transformer.ln_f", "decoder.final_layernorm"), bias=True),),
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
    describe=_gpt2,
    fields={
        "hidden_size": ("n_embd",),
        "intermediate_size": ("n_inner",),
        "num_hidden_layers": ("n_layer",),
        "num_attention_heads": ("n_head",),
        "max_position_embeddings": ("n_positions",),
        "hidden_act": ("activation_function",),
    },
    defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    activation="gelu_tanh",
    rotary=False,
    mlp_ratio=4,
    bare_prefix="transformer.",
    ignored=("*.attn.bias", "*.attn.masked_bias"),
)


_ALL = (LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, GPT2, MIXTRAL, QWEN3_MOE)
FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _ALL}
"""Families by HF's ``model_type``."""
