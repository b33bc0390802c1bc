"""Multi-head latent attention (MLA) over packed sequences: keys and values come from a small latent.

DeepSeek-AI 2024, DeepSeek-V2 (arXiv 2405.04434), section 2.1. Parameters have the names of
Megatron-core's MLASelfAttention (0.19), of its layers without Transformer Engine.

Shape legend: S positions of the pack, of which s are this rank's under sequence parallelism; H
heads of this rank; P plain and R rotated elements of a head's query and key, V of its value.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.megatron.attention import PackedAttention, PackParams
from megarl.models.dims import Dims

_EPSILON = 1e-6
"""Of the norms of latents, whatever the model's is, as in Hugging Face."""


class LatentAttention(torch.nn.Module):
    """A layer's attention, without biases; TP splits its heads, and all ranks have the latents.

    Megatron's ``TransformerLayer`` makes it.

    Args:
        pg_collection: the groups of the model's processes.
        norm: class of the norms of latents.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        *,
        dims: Dims,
        norm: Any,
        **_unused: Any,
    ) -> None:
        super().__init__()
        assert dims.mla is not None
        self._mla = dims.mla
        self._group = pg_collection.tp
        self._heads = dims.heads // pg_collection.tp.size()
        self._split = config.sequence_parallel
        self._yarn_concentration_factor = 1.0  # ``PackedModel`` sets it, as of Megatron's attention
        hidden = config.hidden_size
        heads = dims.size("attention")
        linear: dict[str, Any] = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "tp_group": pg_collection.tp,
        }
        split = {**linear, "gather_output": False}
        if dims.mla.queries is None:
            self.linear_q_proj = ColumnParallelLinear(hidden, heads, **split)
        else:
            self.linear_q_down_proj = _Shared(config, dims.mla.queries, hidden)
            self.q_layernorm = norm(config=config, hidden_size=dims.mla.queries, eps=_EPSILON)
            self.linear_q_up_proj = ColumnParallelLinear(dims.mla.queries, heads, **split)
        self.linear_kv_down_proj = _Shared(config, dims.size("latent_and_rotated"), hidden)
        self.kv_layernorm = norm(config=config, hidden_size=dims.mla.latent, eps=_EPSILON)
        self.linear_kv_up_proj = ColumnParallelLinear(dims.mla.latent, dims.size("expanded_latent"), **split)
        output = {**linear, "input_is_parallel": True, "skip_bias_add": True}
        self.linear_proj = RowParallelLinear(dims.size("values"), hidden, **output)
        self.core_attention = PackedAttention(config=config, softmax_scale=config.softmax_scale)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: PackParams,
        **_unused: Any,
    ) -> tuple[Tensor, None]:
        """[s, 1, hidden] -> the same, as self-attention.

        Args:
            rotary_pos_emb: [S, 1, 1, R] float32, the angles of pairs, twice.
        """
        mla = self._mla
        queries = self._queries(hidden_states).squeeze(1).unflatten(-1, (self._heads, -1))
        projected = self.linear_kv_down_proj(hidden_states)
        latent, rotated = projected.split((mla.latent, mla.rotated), dim=-1)
        expanded, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))
        expanded = expanded.squeeze(1).unflatten(-1, (self._heads, -1))
        plain, value = expanded.split((mla.plain, mla.value), dim=-1)
        # Each rank's gradient is of its own heads.
        if self._split:
            rotated = gather_from_sequence_parallel_region(rotated, group=self._group)
        else:
            rotated = copy_to_tensor_model_parallel_region(rotated, group=self._group)

        angles = rotary_pos_emb[:, 0, :, : mla.rotated // 2]  # [S, 1, R / 2]
        cosines = (angles.cos() * self._yarn_concentration_factor).to(queries.dtype)
        sines = (angles.sin() * self._yarn_concentration_factor).to(queries.dtype)
        query_plain, query_rotated = queries.split((mla.plain, mla.rotated), dim=-1)
        query = torch.cat([query_plain, _rotated(query_rotated, cosines, sines)], dim=-1)
        shared = _rotated(rotated, cosines, sines)  # [S, 1, R]
        key = torch.cat([plain, shared.expand(-1, self._heads, -1)], dim=-1)

        output = self.core_attention(query, key, value, None, packed_seq_params=packed_seq_params)
        result, _ = self.linear_proj(output.unsqueeze(1))
        return result, None

    def _queries(self, hidden_states: Tensor) -> Tensor:
        """[s, 1, hidden] -> [S, 1, H (P + R)]."""
        if self._mla.queries is None:
            return self.linear_q_proj(hidden_states)[0]
        return self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)))[0]


class _Shared(torch.nn.Module):
    """A projection that is the same on all TP ranks, of the positions that a rank has."""

    def __init__(self, config: TransformerConfig, outputs: int, inputs: int) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        empty = torch.empty(outputs, inputs, dtype=config.params_dtype, device=device)
        weight: Any = torch.nn.Parameter(empty)
        weight.sequence_parallel = config.sequence_parallel  # gradients are summed over TP
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def _rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotates pairs of neighbors, [S, heads, R]; returns first elements of all pairs, then second ones."""
    first = x[..., 0::2]
    second = x[..., 1::2]
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
