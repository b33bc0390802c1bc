"""The parameters of decoders with Llama's tensors, and what differs in other families."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, cast

from megarl.models.expert_params import Experts
from megarl.models.hf_config import HFConfigReader, LayerSpec, ParamTable
from megarl.models.param_stacks import Names
from megarl.models.param_types import (
    ColumnParallel,
    DeltaNetParams,
    FusedQKV,
    ParamType,
    Replicated,
    RowParallel,
    VocabRows,
)

_MAX_MTP_LAYERS = 64
QKV = FusedQKV(
    hf=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    megatron="self_attention.linear_qkv",
    vllm="self_attn.qkv_proj",
)
HEAD_NORMS: tuple[ParamType, ...] = tuple(
    Replicated(names=Names(f"self_attn.{of}_norm", f"self_attention.{of}_layernorm"), shape=("head",))
    for of in ("q", "k")
)
GATE_UP = ColumnParallel(hf=("mlp.gate_proj", "mlp.up_proj"), megatron="mlp.linear_fc1", vllm="mlp.gate_up_proj")
DOWN = RowParallel(names=Names("mlp.down_proj", "mlp.linear_fc2"), inputs="ffn")
INPUT_NORM = Replicated(names=Names("input_layernorm", "input_layernorm"))
MLP_NORM = Replicated(names=Names("post_attention_layernorm", "pre_mlp_layernorm"))
PRE_MLP_NORM = Replicated(names=Names("pre_feedforward_layernorm", "pre_mlp_layernorm"))
"""The norm before the MLP in families whose ``post_attention_layernorm`` follows the attention."""
POST_ATTENTION_NORM = Replicated(
    names=Names("post_attention_layernorm", "self_attention.linear_proj.post_layernorm"),
)
POST_MLP_NORM = Replicated(names=Names("post_feedforward_layernorm", "mlp.linear_fc2.post_layernorm"))


def full_attention(
    *, head_norms: tuple[ParamType, ...] = (), bias: bool = False, output_bias: bool = False, gated: bool = False
) -> tuple[ParamType, ...]:
    """Returns the parameters of attention with grouped heads.

    Args:
        head_norms: norms of each head's query and key.
        bias: whether queries, keys and values have biases.
        output_bias: whether the output projection has one.
        gated: whether queries come with gates of the outputs.
    """
    names = Names("self_attn.o_proj", "self_attention.linear_proj")
    output = RowParallel(names=names, inputs="attention", bias=output_bias)
    return (replace(QKV, bias=bias, gated=gated), *head_norms, output)


def llama_table(
    read: HFConfigReader,
    *,
    attention: tuple[ParamType, ...] | None = None,
    mlp: tuple[ParamType, ...] = (GATE_UP, DOWN),
    experts: Mapping[int, tuple[ParamType, ...]] | None = None,
    delta_nets: Collection[int] = (),
    delta_net: DeltaNetParams = DeltaNetParams(),  # noqa: B008 (frozen)
    window: int | None = None,
    windows: Collection[int] | None = None,
    post_norms: bool = False,
    prefix: str = "model.",
    untrained: tuple[str, ...] = (),
    embedding_scale: float | None = None,
    megatron: Mapping[str, Any] | None = None,
) -> ParamTable:
    """Returns Llama's parameters, with what differs in other families.

    Args:
        attention: parameters of the attention; None: those of ``full_attention``.
        mlp: the MLP.
        experts: router and experts of the layers that have them in place of the MLP.
        delta_nets: layers with a gated delta net in place of attention.
        delta_net: its parameters.
        window: last positions, its own included, that each one sees; None: all.
        windows: layers with the window; None: all.
        post_norms: whether norms follow attention and MLP.
        prefix: prefix of HF's names; that of vLLM's is "model.".
        untrained, embedding_scale: see ``ParamTable``.
        megatron: additional fields of ``TransformerConfig``.
    """
    if attention is None:
        attention = full_attention()
    mixtures = experts or {}
    layers: list[LayerSpec] = []
    for layer in range(read.positive("num_hidden_layers")):
        mixer: tuple[ParamType, ...] = attention
        if layer in delta_nets:
            mixer = (delta_net,)
        mlp_params = mixtures.get(layer, mlp)
        params = (INPUT_NORM, *mixer, MLP_NORM, *mlp_params)
        if post_norms:
            params = (INPUT_NORM, *mixer, POST_ATTENTION_NORM, PRE_MLP_NORM, *mlp_params, POST_MLP_NORM)
        has_window = layer not in delta_nets and (windows is None or layer in windows)
        layers.append(LayerSpec(params, window if has_window else None, post_norms))
    return ParamTable(
        embedding=VocabRows(
            names=Names(f"{prefix}embed_tokens", "embedding.word_embeddings", "model.embed_tokens"),
        ),
        layer_prefix=Names(f"{prefix}layers.{{}}.", "decoder.layers.{}.", "model.layers.{}."),
        layers=tuple(layers),
        final=(Replicated(names=Names(f"{prefix}norm", "decoder.final_layernorm", "model.norm")),),
        untrained=untrained,
        embedding_scale=embedding_scale,
        megatron={
            "normalization": "RMSNorm",
            "layernorm_epsilon": read.number("rms_norm_eps"),
            "gated_linear_unit": True,
            "add_qkv_bias": any(isinstance(each, FusedQKV) and each.bias for each in attention),
            "add_bias_linear": False,
            **(megatron or {}),
        },
    )


def layers_of_type(read: HFConfigReader, kind: str, *, interval: str, default: int) -> list[bool]:
    """Reads for each layer whether it is of a type that most layers have.

    ``layer_types`` says so, or else the field ``interval``: all but each such are.

    Args:
        default: the interval where a config has none.
    """
    layers = read.positive("num_hidden_layers")
    every = read.positive(interval, default)
    stated: Any = read.get("layer_types")
    found: list[bool] = []
    if stated is None:
        for layer in range(layers):
            found.append((layer + 1) % every != 0)
        return found
    if not isinstance(stated, list):
        read.problem("layer_types", stated, "is not a list")
        return found
    for each in cast(list[Any], stated):
        found.append(each == kind)
    if len(found) != layers:
        read.problem("layer_types", len(found), f"types are not those of {layers} layers")
    return found


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


EXPERTS = Experts(module="mlp.experts", gate="gate_proj", up="up_proj", down="down_proj")
"""The routed experts of Qwen and GLM."""


def _shared_expert(hf: str) -> tuple[ParamType, ...]:
    """Returns the MLP for all tokens of a layer with experts, by its module in files and in vLLM."""
    return (
        ColumnParallel(
            hf=(f"{hf}.gate_proj", f"{hf}.up_proj"),
            megatron="mlp.shared_experts.linear_fc1",
            vllm=f"{hf}.gate_up_proj",
            outputs="shared_ffn",
        ),
        RowParallel(names=Names(f"{hf}.down_proj", "mlp.shared_experts.linear_fc2"), inputs="shared_ffn"),
    )


_GATED_SHARED_EXPERT: tuple[ParamType, ...] = (
    *_shared_expert("mlp.shared_expert"),
    Replicated(
        names=Names("mlp.shared_expert_gate.weight", "mlp.shared_experts.gate_weight"),
        shape=("one", "hidden"),
        bare=True,
    ),
)
SHARED_EXPERTS = _shared_expert("mlp.shared_experts")
"""Those of DeepSeek and GLM, without a gate: one MLP for all of them."""
SIGMOID_ROUTER = (
    Replicated(
        names=Names("mlp.gate", "mlp.router"),
        shape=("experts", "hidden"),
        vllm_dtype="float32",
    ),
    Replicated(
        names=Names("mlp.gate.e_score_correction_bias", "mlp.router.expert_bias"),
        shape=("experts",),
        bare=True,
        dtype="float32",
        vllm_dtype="float32",
    ),
)
"""A router that adds a bias, which is not trained, to the scores by which it chooses."""


def _groups(read: HFConfigReader) -> dict[str, Any]:
    """Returns the fields of ``TransformerConfig`` of experts in groups, of which a few are chosen first.

    Megatron (0.19, moe_utils.py) adds up as many scores of a group as a token has experts in each
    chosen group, transformers and vLLM two.
    """
    groups = read.positive("n_group")
    chosen = read.positive("topk_group")
    experts = read.positive("num_experts")
    if groups == 1:
        read.require("topk_group", 1, only="1: experts without groups")
        return {}
    if experts % groups or experts < 2 * groups or chosen > groups:
        rule = f"does not divide the {experts} experts into two or more, or is below topk_group, {chosen}"
        read.problem("n_group", groups, rule)
    elif read.positive("num_experts_per_tok") != 2 * chosen:
        read.problem(
            "topk_group", chosen, f"is not half of num_experts_per_tok, which n_group {groups} needs in Megatron"
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


def sigmoid_routing(read: HFConfigReader, mixtures: Collection[int]) -> dict[str, Any]:
    """Returns the fields of ``TransformerConfig`` of a router with ``SIGMOID_ROUTER``."""
    if not read.flag("norm_topk_prob"):
        read.refuse("norm_topk_prob", "is not true, which alone is supported")
    fields = routing(read, mixtures, renormalised=True) | _groups(read)
    fields["moe_router_score_function"] = "sigmoid"
    fields["moe_router_enable_expert_bias"] = True
    fields["moe_router_topk_scaling_factor"] = read.number("routed_scaling_factor")
    fields["moe_router_dtype"] = "fp32"
    return fields


def mixture_layers(read: HFConfigReader) -> range:
    """Reads which layers have experts: all after the first ``first_k_dense_replace``."""
    layers = read.positive("num_hidden_layers")
    dense = read.get("first_k_dense_replace")
    if type(dense) is not int or not 0 <= dense < layers:
        read.problem("first_k_dense_replace", dense, f"is not a number of the {layers} layers, fewer than all")
        dense = 0
    read.require("moe_layer_freq", 1, only="1: experts in each of them")
    return range(dense, layers)


def mtp_tensors(read: HFConfigReader) -> tuple[str, ...]:
    """Returns the patterns of tensors of multi-token prediction (MTP): layers after the others."""
    layers = read.positive("num_hidden_layers")
    count = read.get("num_nextn_predict_layers") or 0
    if type(count) is not int or not 0 <= count <= _MAX_MTP_LAYERS:
        read.problem("num_nextn_predict_layers", count, f"is not a number from 0 to {_MAX_MTP_LAYERS}")
        count = 0
    return tuple(f"model.layers.{layers + further}.*" for further in range(count))


def qwen_mixture(
    read: HFConfigReader,
    layers: Collection[int],
    *,
    renormalised: bool,
) -> tuple[dict[int, tuple[ParamType, ...]], dict[str, Any]]:
    """Returns the experts of Qwen's layers that have some, and their fields of ``TransformerConfig``.

    Beside them there may be a shared expert, with a gate.

    Args:
        renormalised: see ``routing``.
    """
    params = mixture("mlp.gate", EXPERTS)
    fields = routing(read, layers, renormalised=renormalised)
    if read.family.shared_expert == "gated":
        params = (*params, *_GATED_SHARED_EXPERT)
        fields["moe_shared_expert_gate"] = True
    return dict.fromkeys(layers, params), fields


def mixture(router: str, experts: Experts) -> tuple[ParamType, ...]:
    """Returns the parameters of a layer's mixture of experts, whose router has HF's name ``router``."""
    return Replicated(names=Names(router, "mlp.router"), shape=("experts", "hidden")), experts
