"""A role's model: Megatron GPT chunks for one rank, with an LM, a value or a score head.

Under sequence parallelism each TP rank sees a part of the tokens; parameters are marked so that
``finalize_model_grads`` sums their gradients over the TP group. It finds the norms of single heads,
which see all tokens of a part of the heads, by name.

Tokens go to their experts by all-to-all without a capacity, so none is dropped. No loss balances
the routing. Every pass is collective over the ranks that share the experts: a rank without samples
runs it on padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import (
    _MODEL_PARALLEL_RNG_TRACKER_NAME,
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.config.schema import LayerChoice
from megarl.data.packing import RoutedLayers
from megarl.errors import RunError
from megarl.megatron.attention import FusedPackedAttention, PackedAttention, PackParams
from megarl.megatron.delta_net import DeltaNet
from megarl.megatron.experts import GroupedExperts, SharedExpert, quick_gelu
from megarl.megatron.latent_attention import LatentAttention
from megarl.megatron.layer_options import LocalRopeAttention, PostNormLinear
from megarl.megatron.platform.kernels import LayerKind, layer_kind
from megarl.megatron.rotary import rotations
from megarl.megatron.routing import MixtureLayer, Router
from megarl.models import ModelSpec
from megarl.models.hf_config import LayerSpec
from megarl.models.lora import ADAPTER
from megarl.models.transformer_engine import name_in_maps
from megarl.role_specs import Recompute
from megarl.types import HeadName, Layout


class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight in float32, rounded before the weight as in Hugging Face's Qwen2 and Llama."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _parameter(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class FusedRMSNorm(RMSNorm):
    """The same in one kernel, rounded once, after the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class ZeroCenteredRMSNorm(RMSNorm):
    """x / rms(x) * (1 + weight) in float32, rounded once as in Hugging Face's Qwen3.5."""

    def forward(self, x: Tensor) -> Tensor:
        x_float = x.float()
        scale = torch.rsqrt(x_float.square().mean(-1, keepdim=True) + self.eps)
        return (x_float * scale * (1 + self.weight.float())).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the norm op by op, which is the reference."""
    x_float = x.float()
    scale = torch.rsqrt(x_float.square().mean(-1, keepdim=True) + eps)
    return weight * (x_float * scale).to(x.dtype)


class LayerNorm(torch.nn.LayerNorm):
    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps, device="meta")
        self.weight = _parameter(config, hidden_size)
        self.bias = _parameter(config, hidden_size)


def _parameter(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    """[size], unset until weights are imported."""
    values = torch.empty(size, dtype=config.params_dtype, device=torch.cuda.current_device())
    parameter = torch.nn.Parameter(values)
    parameter.sequence_parallel = config.sequence_parallel
    return parameter


_RECOMPUTE: dict[Recompute, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}

_NORMS: Mapping[str, Any] = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "clamped_swiglu": quick_gelu,  # of its gates
}


class ScalarHead(torch.nn.Module):
    """The value or score head: one number per position; the same weights on every TP rank."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype, device=device))
        # As Megatron marks its output layers.
        self.weight.is_embedding_or_output_parameter = True

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, H] -> [T]; computed in float32, as in 16 bits nearby scores would be equal."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return (hidden.to(wide) @ self.weight.to(wide).T).squeeze(-1).float()


class PackedModel(GPTModel):
    """A GPT chunk whose ``heads`` are applied outside."""

    def __init__(self, *, spec: ModelSpec, head: HeadName, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if spec.rope is not None:
            angles, scale = rotations(spec, spec.rope)
            self.rotary_pos_emb.inv_freq = angles.to(torch.cuda.current_device())
            layers: Any = self.decoder.layers
            for layer in layers:
                # Megatron computes it for yarn alone, from undeclared fields of its configuration (0.19).
                layer.self_attention._yarn_concentration_factor = scale
        self._local_angles: Tensor | None = None
        if spec.local_rope is not None:
            angles, scale = rotations(spec, spec.local_rope)
            assert scale == 1.0, "types of rope with a scale are not supported by type of layer"
            self._local_angles = angles.to(torch.cuda.current_device())
        self._embedding_scale = spec.table.embedding_scale
        self.embeds_constants = False
        """Whether embeddings are frozen, though a layer that is computed again needs its input's gradient."""
        if self.post_process and head != "lm":
            self.output_layer = ScalarHead(self.config.hidden_size, self.config.params_dtype)
        if self.pre_process and self.position_embedding_type == "learned_absolute":
            # Megatron makes it in float32 on the CPU.
            device = torch.cuda.current_device()
            self.embedding.position_embeddings.to(device, self.config.params_dtype)

    def _preprocess(self, *, position_ids: None, packed_seq_params: PackParams, **kwargs: Any) -> tuple[Any, ...]:
        """Looks up each position in the table of learned positions or of rope; see ``PackParams``."""
        assert position_ids is None, "the pack has them"
        rows = packed_seq_params.positions
        # Padding sequences may be longer than a table of learned positions.
        learned = rows.clamp(max=self.max_sequence_length - 1).unsqueeze(0)
        # Megatron caches a table of rope for each of the last 32 lengths.
        length = 1 << (packed_seq_params.shape.max_seqlen - 1).bit_length()
        packed = replace(packed_seq_params, max_seqlen_q=length)
        answer: Any = super()._preprocess(position_ids=learned, packed_seq_params=packed, **kwargs)
        embedded, rope, *rest = answer
        if rope is not None:
            rope = rope[rows]
        if self._local_angles is not None:
            half = rows.float().outer(self._local_angles)
            packed_seq_params.local_angles = torch.cat((half, half), dim=-1)[:, None, None]
        if embedded is not None and self._embedding_scale is not None:
            embedded = embedded * torch.full_like(embedded[:1, :1, :1], self._embedding_scale)
        if embedded is not None and self.embeds_constants and torch.is_grad_enabled():
            embedded.requires_grad_()
        return embedded, rope, *rest

    def output_weight(self) -> Tensor:
        """Returns the rows of the LM head on this TP rank."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


@dataclass(frozen=True, kw_only=True)
class RoleModel:
    """The chunks of a role on one rank, one per virtual pipeline stage.

    Args:
        vocab_size: number of token ids in use; those from it on have no probability.
        fused: whether norms, activation and log-probabilities are fused kernels.
        routed: layers whose tokens go to the experts that an engine has recorded; None: such are not used.
    """

    chunks: list[PackedModel]
    config: TransformerConfig
    groups: ProcessGroupCollection
    vocab_size: int
    fused: bool
    routed: RoutedLayers | None = None

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Returns the local parameters by shard-map name, ``chunk:name``; RuntimeError if offloaded."""
        return self._named(adapters=False)

    def adapters(self) -> dict[str, torch.nn.Parameter]:
        """Returns those of adapters, likewise."""
        return self._named(adapters=True)

    def _named(self, *, adapters: bool) -> dict[str, torch.nn.Parameter]:
        self.require_memory()
        named: dict[str, torch.nn.Parameter] = {}
        for index, chunk in enumerate(self.chunks):
            for name, parameter in chunk.named_parameters():
                if (ADAPTER in name) == adapters:
                    named[f"{index}:{name_in_maps(name)}"] = parameter
        return named

    def require_memory(self) -> None:
        for chunk in self.chunks:
            for parameter in chunk.parameters():
                if parameter.numel() > 0 and parameter.untyped_storage().nbytes() == 0:
                    raise RuntimeError("the role is offloaded: its parameters have no memory; onload it first")


class _Stages(PipelineParallelLayerLayout):
    """The layers of each model chunk; Megatron's table reads the global parallel state."""

    def __init__(self, spec: ModelSpec, layout: Layout, stage: int) -> None:
        rows: list[list[str]] = []
        self._first: list[int] = []
        for chunk in range(layout.vpp):
            for other in range(layout.pp):
                layers = spec.layers(layout, other, chunk)
                rows.append(["decoder"] * len(layers))
                if other == stage:
                    self._first.append(layers.start)
        rows[0].insert(0, "embedding")
        rows[-1].append("loss")
        super().__init__(rows, layout.pp)

    def get_layer_offset(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        return self._first[vp_stage or 0]


def _transformer_config(
    spec: ModelSpec,
    layout: Layout,
    stages: _Stages,
    dtype: torch.dtype,
    recompute: Recompute,
    fused: bool,
) -> TransformerConfig:
    """Returns Megatron's configuration of a role.

    ``calculate_per_token_loss`` keeps Megatron from averaging; see ``pipeline``. Under
    interleaving, two stages that are each other's previous and next silently mix up the messages of
    the batched exchange (0.19), so interleaving uses the separate one. That sends in the
    background, so outputs are not freed when handed over: Gloo would silently send other data.
    """
    interleaved = layout.vpp > 1
    activation = spec.family.activation
    experts: dict[str, Any] = {}
    if spec.dims.experts:
        experts = {
            "expert_model_parallel_size": layout.ep,
            # With biases Megatron refuses others (0.19); it reads it for modules that are not used here.
            "expert_tensor_parallel_size": 1 if spec.table.megatron["add_bias_linear"] else layout.tp,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
        }
    return TransformerConfig(
        **spec.transformer_fields(),
        **_RECOMPUTE[recompute],
        **experts,
        activation_func=_ACTIVATIONS[activation],
        bias_activation_fusion=activation == "silu" and fused,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if interleaved else None,
        pipeline_model_parallel_layout=stages,
        sequence_parallel=layout.sequence_parallel,
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        batch_p2p_sync=False,  # it would wait for the whole device, for old versions of NCCL
        deallocate_pipeline_outputs=not interleaved,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,  # weights are imported
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
    )


def build_model(
    spec: ModelSpec,
    layout: Layout,
    groups: ProcessGroupCollection,
    *,
    head: HeadName,
    dtype: torch.dtype,
    trainable: bool,
    vocab_size: int | None = None,
    recompute: Recompute = "none",
    layers: LayerChoice = "auto",
    fused: bool = False,
    replays_routes: bool = False,
) -> RoleModel:
    """Builds this rank's chunks; parameters are uninitialized.

    Raises ValueError if Transformer Engine's layers are wanted and cannot compute the model here.
    """
    _add_rng_states()
    stage = groups.pp.rank()
    device = torch.empty(0, device=torch.cuda.current_device()).device.type
    stages = _Stages(spec, layout, stage)
    config = _transformer_config(spec, layout, stages, dtype, recompute, fused)
    kind = layer_kind(layers, spec.dims, spec.table.kinds, str(dtype).removeprefix("torch."), device)
    _require_agreement(kind, groups.intra_dist_opt)
    norm = _norm(config, kind, fused)
    mixtures = 0
    chunks: list[PackedModel] = []
    for chunk in range(layout.vpp):
        layer_specs: list[ModuleSpec] = []
        for layer in spec.layers(layout, stage, chunk):
            if kind == "local":
                layer_specs.append(_local_layer(config, spec, spec.table.layers[layer], norm, fused))
            else:
                layer_specs.append(_transformer_engine_layer(config))
        model = PackedModel(
            spec=spec,
            head=head,
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules(layer_specs=layer_specs, layer_norm=norm),
            pre_process=stage == 0 and chunk == 0,
            post_process=stage == layout.pp - 1 and chunk == layout.vpp - 1,
            pg_collection=groups,
            vp_stage=chunk if layout.vpp > 1 else None,
            **spec.gpt_arguments(layout.tp, head),
        )
        for layer in model.decoder.layers:
            if isinstance(layer, MixtureLayer):
                layer.index = mixtures
                mixtures += 1
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trainable and not name.endswith(".expert_bias"))
        model.train(trainable)
        chunks.append(model)
    routed: RoutedLayers | None = None
    if replays_routes and spec.dims.experts:
        routed = _routed_layers(spec, layout, stage)
    ids = spec.ids_in_use(vocab_size)
    return RoleModel(
        chunks=chunks,
        config=config,
        groups=groups,
        vocab_size=ids,
        fused=fused,
        routed=routed,
    )


def _routed_layers(spec: ModelSpec, layout: Layout, stage: int) -> RoutedLayers:
    """Returns the layers with experts of a stage."""
    mixtures = spec.table.mixtures
    own: list[int] = []
    for chunk in range(layout.vpp):
        for number in spec.layers(layout, stage, chunk):
            if number in mixtures:
                own.append(mixtures.index(number))
    experts = spec.table.megatron["moe_router_topk"]
    return RoutedLayers(layers=tuple(own), of=len(mixtures), experts=experts)


def _require_agreement(kind: LayerKind, ranks: dist.ProcessGroup) -> None:
    """Raises RunError if the ranks have chosen different layers, whose parameters have other orders."""
    kinds: list[Any] = [None] * ranks.size()
    dist.all_gather_object(kinds, kind, group=ranks)
    if len(set(kinds)) > 1:
        chosen = ", ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
        problem = f"model.layers = auto: the ranks have chosen different layers ({chosen})"
        fix = "install Transformer Engine on all nodes, or set model.layers to local"
        raise RunError(f"{problem}; {fix}")


def _add_rng_states() -> None:
    """Adds the random states that experts and, around dropout even at rate 0, sequence parallelism enter."""
    tracker: Any = get_cuda_rng_tracker()
    names = _MODEL_PARALLEL_RNG_TRACKER_NAME, get_expert_parallel_rng_tracker_name()
    for seed, name in enumerate(names):
        if name not in tracker.get_states():
            tracker.add(name, seed=seed)


def _norm(config: TransformerConfig, kind: LayerKind, fused: bool) -> Any:
    """Returns the module of a norm that stands alone."""
    if kind == "transformer_engine":
        modules: Any = gpt_layer_specs  # its TESpecProvider is None without Transformer Engine
        return modules.TESpecProvider().layer_norm()
    if config.layernorm_zero_centered_gamma:
        return ZeroCenteredRMSNorm
    norm = _NORMS[config.normalization]
    if fused and norm is RMSNorm:
        return FusedRMSNorm
    return norm


def _local_layer(
    config: TransformerConfig,
    spec: ModelSpec,
    kind: LayerSpec,
    norm: Any,
    fused: bool,
) -> ModuleSpec:
    """Returns Megatron's local layer with this package's norms, attention, delta net and router."""
    layer: Any = gpt_layer_specs.get_gpt_layer_local_spec(normalization=config.normalization)
    if kind.is_mixture:
        experts: Any = GroupedExperts  # it lacks the delayed weight gradients of Megatron's interface
        modules = MoESubmodules(experts=experts, router=Router)
        if config.moe_shared_expert_intermediate_size is not None:
            modules.shared_experts = partial(SharedExpert, submodules=layer.submodules.mlp.keywords["submodules"])
        layer.submodules.mlp = partial(MoELayer, submodules=modules)
        layer.module = MixtureLayer
    layer.submodules.input_layernorm = norm
    layer.submodules.pre_mlp_layernorm = norm
    if kind.is_delta_net:
        layer.submodules.self_attention = ModuleSpec(DeltaNet, params={"fused": fused})
        return layer
    if spec.dims.mla is not None:
        layer.submodules.self_attention = ModuleSpec(LatentAttention, params={"dims": spec.dims, "norm": norm})
        return layer
    if spec.local_rope is not None and kind.window is not None:
        layer.submodules.self_attention.module = LocalRopeAttention
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = partial(PackedAttention, window=kind.window)
    attention.q_layernorm = norm if config.qk_layernorm else IdentityOp
    attention.k_layernorm = attention.q_layernorm
    if kind.post_norms:
        attention.linear_proj = partial(PostNormLinear, norm=norm)
        layer.submodules.mlp.keywords["submodules"].linear_fc2 = partial(PostNormLinear, norm=norm)
    return layer


def _transformer_engine_layer(config: TransformerConfig) -> ModuleSpec:
    """Returns Megatron's layer of Transformer Engine's modules, with norms in linear layers."""
    specs: Any = gpt_layer_specs  # its TESpecProvider is None without Transformer Engine
    modules = specs.TESpecProvider()
    layer: Any = specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = partial(FusedPackedAttention, modules.core_attention())
    return layer
