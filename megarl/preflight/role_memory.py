"""The memory of a role on a rank, bytes.

Parameters and optimizer state are exact. Activations are those that the backward pass of Megatron's
local layers keeps (megarl/megatron/model.py), op by op or with fused kernels, for packs as long as
they may become, whose tokens are all of responses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from megarl.models import ModelSpec
from megarl.models.dims import DELTA_CHUNK
from megarl.models.hf_config import LayerSpec
from megarl.models.lora import AdaptedMatrix, adapted_matrices, adapter_map
from megarl.models.param_stacks import ShardCoords
from megarl.role_specs import RoleSpec, adapters_of, logit_chunk
from megarl.rollout.routes import route_dtype
from megarl.types import HEADS, Layout, RankCoords
from megarl.weights.shard_map import ITEM_BYTES, TensorInfo

_DIVERGENCE: Final[Mapping[str, int]] = {"reverse": 24, "forward": 20, "jsd": 32}
"""Most bytes of a vocabulary entry and token in either pass of a divergence of whole distributions, by form."""


@dataclass(frozen=True, kw_only=True)
class RoleMemory:
    """A role on a rank, bytes.

    Args:
        parameters: the weights that are its own.
        base: those of them below adapters.
        optimizer: the optimizer's state; 0 without training.
        stepping: intermediate results of the step: on CUDA, whose Adam is fused, a clipped gradient
            of each weight in turn; two of Adam on a CPU.
        snapshot: what this rank writes of a checkpoint: a part of what its replicas share, and
            its state.
        written: what writing takes: a copy of one tensor, and what torch.save makes of it.
        inference: activations of a forward pass, one layer at a time, and logits.
        update: activations for a backward pass, and logits with the head's gradients.
    """

    spec: RoleSpec
    parameters: int
    base: int
    gradients: int
    optimizer: int
    stepping: int
    snapshot: int
    written: int
    inference: tuple[int, int]
    update: tuple[int, int]

    @property
    def state(self) -> int:
        """What the role has on its device while it is not offloaded."""
        return self.parameters + self.optimizer

    @property
    def frozen(self) -> int:
        """Its weights that never change, of which the host keeps a copy."""
        if self.spec.is_frozen:
            return self.parameters
        return self.base


def role_memory(
    spec: RoleSpec,
    model: ModelSpec,
    stage: int,
    device: str,
    *,
    pack: int,
    update_pack: int,
    micro_batches: int,
    reference: ModelSpec | None = None,
) -> RoleMemory:
    """Returns the memory of a role on a rank of a pipeline stage.

    Args:
        pack: tokens of the longest pack in inference.
        update_pack: tokens of the longest pack in an update.
        micro_batches: number of packs of a rank in an update.
        reference: whose distributions the update reads; None: the same model.
    """
    layout = spec.layout
    dims = model.dims
    item = ITEM_BYTES[model.dtype]
    head = HEADS[spec.name]
    frozen, trained = _params(spec, model, layout.rank(RankCoords(tp=0, dp=0, pp=stage)))
    elements = 0
    shards: list[int] = []  # elements of each parameter that this rank's optimizer has
    experts = 0  # elements of the largest parameter of experts, whose gradient is made at once
    for name, info in trained.items():
        size = math.prod(info.shape)
        elements += size
        ranks = layout.dp
        if "mlp.experts." in name:
            ranks //= layout.ep
            experts = max(experts, size)
        shards.append(-(-size // ranks))
    base = _base_elements(spec, frozen) * item
    parameters = elements * item + base
    optimizer = 0
    if spec.training is not None:
        # Moments, float32 weights, average.
        columns = 2 + (item < 4) + (spec.training.ema_decay is not None)
        optimizer = 4 * columns * sum(shards)
    stepping = 8 * max(shards)
    if device == "cuda":
        stepping //= 2
    inference_logits = 0
    update_logits = 0
    if stage == layout.pp - 1 and head == "lm":
        rows = dims.padded_vocab("megatron", layout.tp) // layout.tp
        inference_logits = _logits(spec, item, pack) * rows
        update_logits = _update_logits(spec, model, reference or model, rows, update_pack, micro_batches)
    forward = pack * _passing(model, layout.tp) * item
    layer = _largest_layer(spec, model, device)
    activations = update_pack * _kept(spec, model, stage, micro_batches, layer)
    again = _recomputed(spec, model, device, layer)  # when the logits are gone
    activations += max(0.0, update_pack * again - update_logits) + item * experts
    activations += _adapter_blocks(spec, model, stage)
    return RoleMemory(
        spec=spec,
        parameters=parameters,
        base=base,
        gradients=4 * elements,
        optimizer=optimizer,
        stepping=stepping,
        snapshot=elements * item // layout.dp + optimizer,
        written=8 * max(shards),
        inference=(int(forward), inference_logits),
        update=(int(activations), update_logits),
    )


def _passing(model: ModelSpec, tp: int) -> float:
    """Returns the elements of a token that a layer has in a forward pass."""
    dims = model.dims
    attention = (4 * dims.heads + 6 * dims.kv_heads) * dims.head_dim / tp
    if dims.mla is not None:
        attention += dims.mla.latent + dims.mla.rotated + (dims.mla.queries or 0)  # TP does not divide them
    mlp = 5 * max(_channels(model, kind) for kind in model.table.kinds) / tp
    return 3 * dims.hidden + max(attention, mlp)


def _params(
    spec: RoleSpec,
    model: ModelSpec,
    rank: int,
) -> tuple[dict[str, TensorInfo], dict[str, TensorInfo]]:
    """Returns the parameters of a rank that stay as they are, and the others; of a role that is not trained, all."""
    head = HEADS[spec.name]
    whole = dict(model.megatron_map(spec.layout, rank, head).params)
    if spec.lora is None:
        return {}, whole
    trained = dict(adapter_map(model, adapters_of(spec.lora), spec.layout, rank).params)
    for name in list(whole):
        if head != "lm" and name.endswith("output_layer.weight"):
            trained[name] = whole.pop(name)
    return whole, trained


def _base_elements(spec: RoleSpec, frozen: Mapping[str, TensorInfo]) -> int:
    """Returns the elements of the weights below adapters, unless they are the actor's."""
    if spec.training is not None and spec.training.shares_base:
        return 0
    return sum(math.prod(info.shape) for info in frozen.values())


def _routes(spec: RoleSpec, model: ModelSpec, stage: int) -> int:
    """Returns the bytes of a token's recorded experts, which all micro-batches of a step have on the device."""
    if not spec.replays_routes or not model.dims.experts:
        return 0
    layers = 0
    for chunk in range(spec.layout.vpp):
        for layer in model.layers(spec.layout, stage, chunk):
            layers += layer in model.table.mixtures
    item = np.dtype(route_dtype(model.dims.experts)).itemsize
    return layers * model.table.megatron["moe_router_topk"] * item


def _update_logits(
    spec: RoleSpec, model: ModelSpec, reference: ModelSpec, rows: int, pack: int, micro_batches: int
) -> int:
    """Returns the bytes of the logits of some rows of the vocabulary in an update, with the head's gradients."""
    hidden = model.dims.hidden
    item = ITEM_BYTES[model.dtype]
    logits = _logits(spec, item, pack) * rows
    if spec.divergence is not None:
        logits = max(logits, _DIVERGENCE[spec.divergence] * min(logit_chunk(False), pack) * rows)
        # Of the reference's hidden states, for all micro-batches of the step.
        logits += micro_batches * pack * reference.dims.hidden * ITEM_BYTES[reference.dtype]
    if spec.lora is not None:
        return logits + pack * hidden * item  # the head is frozen
    return logits + rows * hidden * (4 + item) + pack * hidden * item


def _logits(spec: RoleSpec, item: int, pack: int) -> int:
    """Returns the bytes of the logits of a vocabulary entry: products, or two numbers in float32."""
    tokens = min(logit_chunk(spec.fused), pack)
    if spec.fused:
        return item * tokens
    return 8 * tokens


def _kept(spec: RoleSpec, model: ModelSpec, stage: int, micro_batches: int, layer: float) -> float:
    """Returns the bytes of a token that a stage keeps for backward passes, ``layer`` in a layer."""
    layout = spec.layout
    split = _split(layout)
    hidden = model.dims.hidden * ITEM_BYTES[model.dtype] * split
    layers = max(len(model.layers(layout, stage, chunk)) for chunk in range(layout.vpp))
    if spec.recompute == "full":
        layer = hidden
    ends = hidden
    if stage == layout.pp - 1:
        ends = 3 * hidden + _norm(spec, model) * split
    routes = micro_batches * _routes(spec, model, stage)
    return layer * layers * _in_flight(layout, stage, micro_batches) + ends + routes


def _in_flight(layout: Layout, stage: int, micro_batches: int) -> int:
    """Returns the micro-batches (of chunks) whose activations a stage holds at once."""
    pp = layout.pp
    vpp = layout.vpp
    if vpp == 1:
        return min(pp - stage, micro_batches)
    return min(2 * (pp - stage - 1) + (vpp - 1) * pp + 1, micro_batches * vpp)


def _channels(model: ModelSpec, kind: LayerSpec) -> int:
    """Returns the channels of a layer's MLP, or of the experts of a token, over which tokens are spread evenly."""
    if kind.is_mixture:
        return model.dims.expert_ffn * model.table.megatron["moe_router_topk"]
    return model.dims.ffn


def _largest_layer(spec: RoleSpec, model: ModelSpec, device: str) -> float:
    return max(_layer(spec, model, kind, device) for kind in model.table.kinds)


def _layer(spec: RoleSpec, model: ModelSpec, kind: LayerSpec, device: str) -> float:
    """Returns the bytes of a token that a layer keeps, or recomputes, for its backward pass."""
    dims = model.dims
    tp = spec.layout.tp
    item = ITEM_BYTES[model.dtype]
    norms = 2 * _norm(spec, model) * _split(spec.layout)
    if spec.recompute == "selective":
        norms = 2 * dims.hidden * item * _split(spec.layout)
        if device == "cuda" and spec.layers != "local":
            # Transformer Engine's linear layer of queries keeps its normalized input.
            norms += dims.hidden * item * _split(spec.layout)
    if kind.post_norms:
        kept = 1 if spec.recompute == "selective" else 2  # the MLP's is recomputed with it
        norms += kept * 4 * (2 * dims.hidden + 1) * _split(spec.layout)
    if kind.is_delta_net:
        mixer = _delta_net(model, item, tp)
    elif dims.mla is not None:
        mixer = _latent_attention(spec, model)
    else:
        mixer = _attention(spec, model, device)
    ffn = _channels(model, kind) * item / tp
    if kind.is_mixture:
        chosen = model.table.megatron["moe_router_topk"]
        experts = 5 * ffn  # with the product of the router's weight
        if model.table.megatron["add_bias_linear"]:
            # Sums, what is clamped, a sigmoid and three products; rows of output biases, and their numbers.
            experts = 8 * ffn + chosen * (4 * dims.hidden + 8)
        elif spec.fused:
            experts = 3 * ffn
        router = 16 * dims.experts
        if model.table.megatron["moe_router_pre_softmax"]:
            router += 4 * dims.experts
        if model.table.megatron.get("moe_router_score_function") == "sigmoid":
            router += 4 * (dims.experts + 2 * chosen)
        mlp = experts + chosen * dims.hidden * item + router * _split(spec.layout)
        if dims.shared_ffn:
            products = 3 if spec.fused else 5
            mlp += products * dims.shared_ffn * item / tp
        if model.table.megatron.get("moe_shared_expert_gate"):
            mlp += (dims.hidden + 1) * item
    elif spec.recompute == "selective":
        mlp = 0.0
    elif model.table.megatron["gated_linear_unit"]:
        mlp = 5 * ffn
        if spec.fused and model.family.activation == "silu":
            mlp = 3 * ffn
    else:
        mlp = 2 * ffn
    return norms + mixer + mlp + _adapter_products(spec, model, kind)


def _adapter_blocks(spec: RoleSpec, model: ModelSpec, stage: int) -> int:
    """Returns the bytes of B among zeros, and of their mask, of the matrices of a stage with several adapters."""
    elements = 0
    if spec.recompute == "full":
        return elements
    coords = ShardCoords(tp=spec.layout.tp, ep=spec.layout.ep)
    for chunk in range(spec.layout.vpp):
        for layer in model.layers(spec.layout, stage, chunk):
            for adapted in _kept_adapters(spec, model, model.table.layers[layer], coords):
                if len(adapted.modules) > 1:
                    elements += 2 * adapted.b.shape[0] * adapted.a.shape[0]
    return elements * ITEM_BYTES[model.dtype]


def _adapter_products(spec: RoleSpec, model: ModelSpec, kind: LayerSpec) -> float:
    """Returns the bytes of a token that adapters of a layer keep: its products with their matrices A."""
    products = 0.0
    for adapted in _kept_adapters(spec, model, kind, ShardCoords(ep=model.dims.experts or 1)):
        if adapted.matrix.of:
            products += model.table.megatron["moe_router_topk"] * adapted.a.shape[0]
        elif adapted.split == 0:
            products += adapted.a.shape[0]
        else:
            products += adapted.a.shape[0] * _split(spec.layout)
    return products * ITEM_BYTES[model.dtype]


def _kept_adapters(
    spec: RoleSpec,
    model: ModelSpec,
    kind: LayerSpec,
    coords: ShardCoords,
) -> Iterator[AdaptedMatrix]:
    """Yields the adapters of a layer that are not computed again."""
    if spec.lora is None:
        return
    adapters = adapters_of(spec.lora)
    for adapted in adapted_matrices(kind.params, adapters, "megatron", model.dims, coords):
        is_mlp = adapted.matrix.param.startswith("mlp.") and not kind.is_mixture
        if spec.recompute != "selective" or not is_mlp:
            yield adapted


def _attention(spec: RoleSpec, model: ModelSpec, device: str) -> float:
    """Returns the bytes of a token that attention keeps, with its rotations."""
    dims = model.dims
    tp = spec.layout.tp
    item = ITEM_BYTES[model.dtype]
    rope = 0.0
    if model.rope is not None:
        rope = 4 * dims.head_dim * item * model.rope.share
    qkv = (dims.heads + 2 * dims.kv_heads) * dims.head_dim * item / tp
    one = dims.heads * dims.head_dim * item / tp  # queries, or the attention's output
    kv = 2 * dims.kv_heads * dims.head_dim * item / tp
    sinks = "softmax_type" in model.table.megatron
    if device == "cuda" and item < 4 and not sinks:
        attention = one + kv / 2 + qkv + one + 4 * dims.heads / tp  # queries and keys are rotated copies
    else:
        attention = 3 * one + kv + 4 * dims.heads / tp  # in rectangles
    if sinks and device == "cuda":
        # A key and a value for each head of queries, all of them wider.
        attention = 5 * dims.heads * (dims.head_dim + 8) * item / tp + 4 * dims.heads / tp
    elif sinks:
        attention += 2 * (dims.heads + dims.kv_heads) * item / tp  # heads are wider by one
    if model.table.megatron.get("qk_layernorm"):
        heads = (dims.heads + dims.kv_heads) / tp
        attention += 4 * heads
        fused = spec.fused and not _zero_centered(model)
        if _zero_centered(model) and spec.lora is None:
            attention += 4 * (one + kv / 2) / item  # quotients in float32
        elif not fused and spec.lora is None:
            attention += one + kv / 2  # quotients
        if not fused and item < 4:
            attention += 4 * (one + kv / 2) / item  # inputs in float32
        elif device == "cuda" and item < 4:
            attention += one  # inputs; those of keys are a part of what is projected
        else:
            attention += one + qkv
    if model.table.megatron.get("attention_output_gate"):
        attention += one + 4 * one / item  # outputs, and the sigmoid of gates in float32
        if item == 4:
            attention += one  # gates, which the inputs of keys are a part of
    return rope + attention


def _latent_attention(spec: RoleSpec, model: ModelSpec) -> float:
    """Returns the bytes of a token that latent attention keeps: kernels take values as wide as queries."""
    dims = model.dims
    mla = dims.mla
    assert mla is not None
    item = ITEM_BYTES[model.dtype]
    heads = dims.heads / spec.layout.tp
    # Queries, keys, values and outputs; numbers of each head; the outputs that are read; angles.
    kept = heads * (4 * dims.head_dim * item + 4 + mla.value * item) + mla.rotated * item
    latents = 0.0
    for latent in (mla.queries, mla.latent):
        if latent is not None:
            latents += _norm_of(latent, spec, model)
    if spec.fused or item == 4:
        latents += mla.rotated * item  # projected with the norm's input
    return kept + latents * _split(spec.layout)


def _delta_net(model: ModelSpec, item: int, tp: int) -> float:
    """Returns the bytes of a token that a delta net keeps; all but projections and outputs is in float32."""
    delta = model.dims.delta
    assert delta is not None
    heads = delta.value_heads / tp
    values = heads * delta.value_dim
    keys = heads * delta.key_dim  # those that value heads share are copied
    mixed = 2 * delta.key_heads * delta.key_dim / tp + values
    # In 16 bits, of a copy in float32.
    projected = 4 * (mixed + values + 2 * heads)
    convolved = 4 * (delta.width - 1) * mixed + item * mixed
    # Queries and keys before and after their norm, scaled and transposed, in columns with values, and solved.
    rule = 4 * (8 * keys + 3 * (keys + values))
    # Products within chunks, and numbers of each head.
    rule += 4 * heads * (5 * DELTA_CHUNK + 9)
    # The state before each chunk, and what a chunk adds to it.
    states = 4 * values
    states += 4 * heads * delta.key_dim * delta.value_dim / DELTA_CHUNK
    # Outputs, the norm's parts, and the gates' SiLU in float32.
    output = 4 * values + 3 * item * values + 4 * values
    return projected + convolved + rule + states + output


def _recomputed(spec: RoleSpec, model: ModelSpec, device: str, layer: float) -> float:
    """Returns the bytes of a token that the backward pass of a layer recomputes; ``layer`` are those that it keeps."""
    if spec.recompute == "full":
        return layer
    if spec.recompute == "selective":
        return _largest_layer(replace(spec, recompute="none"), model, device) - layer
    return 0.0


def _norm(spec: RoleSpec, model: ModelSpec) -> float:
    return _norm_of(model.dims.hidden, spec, model)


def _norm_of(width: int, spec: RoleSpec, model: ModelSpec) -> float:
    """Returns the bytes of a norm and of its output: RMSNorm keeps its input and the quotient, others the input.

    Transformer Engine's do (pytorch/module/layernorm_linear.py, 2.8 to 2.20), which was never
    measured, and torch's fused one.
    """
    item = ITEM_BYTES[model.dtype]
    if model.table.megatron["normalization"] == "LayerNorm" or spec.layers == "transformer_engine":
        return 2 * width * item + 8
    quotients = int(spec.lora is None)  # for the gradients of weights
    if _zero_centered(model):
        return width * (4 + 4 * quotients + item) + 4
    if spec.fused:
        return 2 * width * item + 4
    return width * (4 + (1 + quotients) * item) + 4


def _zero_centered(model: ModelSpec) -> bool:
    """Returns whether norms multiply by 1 + weight: these are not fused, and keep quotients in float32."""
    return bool(model.table.megatron.get("layernorm_zero_centered_gamma"))


def _split(layout: Layout) -> float:
    """Returns the part of the tokens that a rank has between the tensor-parallel regions."""
    return 1 / layout.tp if layout.sequence_parallel else 1.0
