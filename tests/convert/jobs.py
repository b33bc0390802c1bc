"""Jobs of ranks: Megatron's own loading and saving of its modules."""

from __future__ import annotations

import queue
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from megarl.types import Layout
from tests.convert.directories import read_directory
from tests.weights.models import placed

DELTA_NET_NORM = "self_attention.in_proj.layer_norm_"


def load(rank: int, config: dict[str, Any], layout: Layout, directory: str, hf: str) -> None:
    """Loads a checkpoint into Megatron's model, and compares it with HF's tensors."""
    from megatron.core import dist_checkpointing

    spec, model, sharded = _model(rank, config, layout)
    loaded: Any = dist_checkpointing.load(sharded, directory)
    for name, chunk in _chunks(model).items():
        chunk.load_state_dict(loaded[name], strict=True)
    parameters = model.parameters()
    expected = placed(read_directory(Path(hf)), spec.megatron_map(layout, rank, spec.head))
    compared: set[str] = set()
    for name, parameter in parameters.items():
        held, value = _of_expert(expected, name)
        value = value - int(name.endswith("out_norm.weight"))  # Megatron multiplies by 1 + weight
        assert torch.equal(parameter, value), name
        compared.add(held)
    assert compared == expected.keys()


def save(rank: int, config: dict[str, Any], layout: Layout, directory: str, hf: str, metadata: dict[str, Any]) -> None:
    """Saves Megatron's model with the tensors of HF, by its sharded state with this metadata."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    spec, model, _ = _model(rank, config, layout)
    shard_map = spec.megatron_map(layout, rank, spec.head)
    held = placed(read_directory(Path(hf)), shard_map, padding=float("nan"))  # what padding holds must not matter
    with torch.no_grad():
        for name, parameter in model.parameters().items():
            parameter.copy_(_of_expert(held, name)[1] - int(name.endswith("out_norm.weight")))
    if rank == 0:
        Path(directory).mkdir(parents=True)
    torch.distributed.barrier()
    state = {**_sharded(model, metadata), "checkpoint_version": 3.0, "iteration": 7}
    # In place of a queue of a process of its own, which would outlive this one.
    with patch.object(filesystem_async, "get_write_results_queue", queue.Queue):
        dist_checkpointing.save(state, directory, content_metadata=metadata)


def _of_expert(held: dict[str, torch.Tensor], name: str) -> tuple[str, torch.Tensor]:
    """What our maps hold of a parameter of Megatron's, and its name there; ours have all experts of a rank in one."""
    before, found, after = name.partition("local_experts.")
    if not found:
        return name, held[name]
    expert, _, rest = after.partition(".")
    return before + rest, held[before + rest][int(expert)]


def _model(rank: int, config: dict[str, Any], layout: Layout) -> tuple[Any, Any, Any]:
    """The spec, this rank's chunks with Megatron's own experts, delta nets and latent attention, and what it saves."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.ssm.gated_delta_net import common, gdn

    from megarl.megatron import model as models
    from megarl.megatron.parallel import GroupCache, build_groups
    from megarl.models import model_spec

    spec = model_spec(config)
    groups = build_groups(layout, rank, GroupCache())
    dtype = getattr(torch, spec.dtype)
    own = {
        "GroupedExperts": LocalSpecProvider().grouped_mlp_modules(False),
        "_local_layer": partial(_own_mixer, models._local_layer),
    }
    # Its delta net asks for the kernels when it is made.
    with (
        patch.multiple(models, **own),
        patch.object(common, "HAVE_FLA", True),
        patch.object(gdn, "chunk_gated_delta_rule", common.torch_chunk_gated_delta_rule),
    ):
        model = models.build_model(spec, layout, groups, head=spec.head, dtype=dtype, trainable=False)
    return spec, model, _sharded(model, {})


def _own_mixer(ours: Any, config: Any, spec: Any, kind: Any, norm: Any, fused: bool) -> Any:
    """The layer with Megatron's delta net or latent attention; norms have the keys of Transformer Engine."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    layer = ours(config, spec, kind, norm, fused)
    if kind.is_delta_net:
        linear: dict[str, Any] = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}
        parts = GatedDeltaNetSubmodules(**linear, out_norm=norm)
        layer.submodules.self_attention = ModuleSpec(module=GatedDeltaNet, submodules=parts)
        keys = layer.submodules.sharded_state_dict_keys_map
        layer.submodules.sharded_state_dict_keys_map = {**keys, "input_layernorm.": DELTA_NET_NORM}
    elif spec.dims.mla is not None:
        layer.submodules.self_attention = _own_latent_attention(config, spec.dims.mla, norm)
        norms = {} if kind.is_mixture else {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
        for of in ("q", "kv"):
            norms[f"self_attention.{of}_layernorm."] = f"self_attention.linear_{of}_up_proj.layer_norm_"
        layer.submodules.sharded_state_dict_keys_map = norms
    return layer


def _own_latent_attention(config: Any, mla: Any, norm: Any) -> Any:
    """Megatron's, whose projections to latents are split by TP without Transformer Engine."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from megarl.megatron.attention import PackedAttention

    latent = MLATransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        params_dtype=config.params_dtype,
        add_bias_linear=False,
        qk_layernorm=True,
        rope_type="rope",
        q_lora_rank=mla.queries,
        kv_lora_rank=mla.latent,
        qk_head_dim=mla.plain,
        qk_pos_emb_head_dim=mla.rotated,
        v_head_dim=mla.value,
    )

    class Own(MLASelfAttention):
        def __init__(self, config: Any, **arguments: Any) -> None:
            super().__init__(latent, **arguments)

    layer: Any = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True, multi_latent_attention=True)
    attention = layer.submodules.self_attention
    attention.module = Own
    attention.submodules.core_attention = PackedAttention
    attention.submodules.q_layernorm = norm
    attention.submodules.kv_layernorm = norm
    return attention


def _chunks(model: Any) -> dict[str, Any]:
    """By the names that Megatron-LM gives them."""
    if len(model.chunks) == 1:
        return {"model": model.chunks[0]}
    return {f"model{i}": chunk for i, chunk in enumerate(model.chunks)}


def _sharded(model: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    """Megatron's sharded state; of tied embeddings it reads the global rank, which Megatron-LM's programs have set."""
    from megatron.core import parallel_state

    metadata = {**metadata, "dp_cp_group": model.groups.dp_cp}
    with patch.object(parallel_state, "_MPU_DATA_PARALLEL_RANK", model.groups.dp_cp.rank()):
        return {name: chunk.sharded_state_dict(metadata=dict(metadata)) for name, chunk in _chunks(model).items()}
