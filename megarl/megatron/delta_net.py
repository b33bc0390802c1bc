"""Gated delta nets over packed sequences (THD): linear attention whose state decays and is corrected.

Yang et al. 2024, Gated Delta Networks (arXiv 2412.06464). A head has a state [K, V] instead of the keys
and values of all positions. At a position with query q, key k, value v, decay g and strength b:

    state = exp(g) state
    state = state + k (b (v - k state))
    output = q state

Parameters have the names and shapes of Megatron-core's GatedDeltaNet (0.19), which needs
flash-linear-attention. Here its kernel is used on GPUs where it is installed, in 16 bits; else torch.

Shape legend: S positions of the pack; of a rectangle B sequences, H value heads, L positions, N chunks of
C positions, K and V dims of a head's keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.megatron.attention import Arrangement, PackParams
from megarl.models.dims import DELTA_CHUNK

_EPSILON = 1e-6
"""Added to the squared norm of queries and keys, here and in flash-linear-attention."""
_LARGEST_HEAD = 256
"""Elements of a head's key that its kernel takes (0.6)."""


class DeltaNet(torch.nn.Module):
    """A layer's mixer in place of self-attention, without biases; TP splits its heads.

    Megatron's ``TransformerLayer`` makes it. Parameters, with this rank's heads:
        in_proj.weight: [channels of queries, keys, values, gates, strengths and steps, hidden].
        conv1d.weight: [channels of queries, keys and values, 1, width].
        dt_bias, A_log: [value heads].
        out_norm.weight: [V], the same on all ranks.
        out_proj.weight: [hidden, channels of values].

    Args:
        config: has the sizes in Megatron's fields ``linear_*``.
        pg_collection: the groups of the model's processes.
        fused: whether kernels may be used that are not torch's.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        fused: bool = False,
        **_unused: Any,
    ) -> None:
        super().__init__()
        self._fused = fused
        self._group = pg_collection.tp
        tp = pg_collection.tp.size()
        sizes: Any = config
        self._key_heads = sizes.linear_num_key_heads // tp
        self._value_heads = sizes.linear_num_value_heads // tp
        self._key_dim = sizes.linear_key_head_dim
        self._value_dim = sizes.linear_value_head_dim
        self._width = sizes.linear_conv_kernel_dim
        self._epsilon = config.layernorm_epsilon
        keys = self._key_heads * self._key_dim
        values = self._value_heads * self._value_dim
        self._parts = (2 * keys + values, values, self._value_heads, self._value_heads)
        self._convolved = (keys, keys, values)
        linear: dict[str, Any] = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "tp_group": pg_collection.tp,
        }
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            tp * sum(self._parts),
            gather_output=False,
            **linear,
        )
        self.conv1d = _Weight(_split(config, self._parts[0], 1, self._width))
        self.dt_bias = _split(config, self._value_heads)
        self.A_log = _split(config, self._value_heads)
        self.out_norm = _Weight(_parameter(config, self._value_dim))
        self.out_proj = RowParallelLinear(
            tp * values,
            config.hidden_size,
            input_is_parallel=True,
            skip_bias_add=True,
            **linear,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackParams,
        **_unused: Any,
    ) -> tuple[Tensor, None]:
        """[S, 1, hidden] -> the same, as self-attention; under sequence parallelism, of a part of S."""
        assert attention_mask is None, "a pack has no mask"
        projected, _ = self.in_proj(hidden_states)
        mixed, gate, strength, step = projected.squeeze(1).split(self._parts, dim=-1)

        # Queries, keys and values of the last positions, [S, H, K or V].
        mixed = _convolved(mixed, self.conv1d.weight, packed_seq_params.positions)
        query, key, value = mixed.split(self._convolved, dim=-1)
        query = query.unflatten(-1, (self._key_heads, self._key_dim))
        key = key.unflatten(-1, (self._key_heads, self._key_dim))
        value = value.unflatten(-1, (self._value_heads, self._value_dim))

        # The state's decay and the strength of its corrections, [S, H].
        rate = self.A_log.float().exp()
        decay = -rate * F.softplus(step.float() + self.dt_bias)
        strength = strength.sigmoid()

        if self._fused and kernel_takes(key):
            output = by_kernel(query, key, value, decay, strength, packed_seq_params)
        else:
            output = _by_rectangle(
                self._of_value_heads(query),
                self._of_value_heads(key),
                value,
                decay,
                strength,
                packed_seq_params.arrangement,
            )
        output = output.to(value.dtype)
        output = self._normalized(output, gate.view_as(value))
        result, _ = self.out_proj(output.flatten(1).unsqueeze(1))
        return result, None

    def _of_value_heads(self, x: Tensor) -> Tensor:
        """[S, key heads, K] -> [S, H, K]; value heads that follow each other share a key head."""
        return x.repeat_interleave(self._value_heads // self._key_heads, dim=1)

    def _normalized(self, x: Tensor, gate: Tensor) -> Tensor:
        """Returns each head's RMS norm times silu of the gate, [S, H, V].

        The norm is rounded before the weight, as in Hugging Face.
        """
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._epsilon)
        # Each rank's gradient is of its own heads.
        weight = copy_to_tensor_model_parallel_region(self.out_norm.weight, self._group)
        normed = weight * (wide * scale).to(x.dtype)
        return (normed * F.silu(gate.float())).to(x.dtype)


class _Weight(torch.nn.Module):
    """A parameter with the name that it has in Megatron's module."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


def _parameter(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    """Returns a parameter that is unset until weights are imported."""
    values = torch.empty(shape, dtype=config.params_dtype, device=torch.cuda.current_device())
    return torch.nn.Parameter(values)


def _split(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    """Returns a parameter that TP splits along its first axis."""
    parameter = _parameter(config, *shape)
    set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    return parameter


def _convolved(x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """Returns silu of each channel's causal convolution over the last positions of its own sequence.

    Args:
        x: [S, channels].
        weight: [channels, 1, width], the last for the position itself.
        positions: [S], each one's index in its sequence.
    """
    width = weight.shape[-1]
    wide = x.float()
    total = wide * weight[:, 0, -1]
    for back in range(1, width):
        earlier = F.pad(wide, (0, 0, back, 0))[: len(wide)]
        earlier = earlier * (positions >= back).unsqueeze(-1)
        total = total + earlier * weight[:, 0, width - 1 - back]
    return F.silu(total.to(x.dtype))


def kernel_takes(key: Tensor) -> bool:
    """Whether flash-linear-attention is installed and takes keys; its products of float32 are in TF32."""
    if not key.is_cuda or key.dtype not in (torch.float16, torch.bfloat16):
        return False
    return key.shape[-1] <= _LARGEST_HEAD and _is_installed()


@cache
def _is_installed() -> bool:
    return find_spec("fla") is not None


def by_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    strength: Tensor,
    pack: PackParams,
) -> Tensor:
    """Returns the outputs [S, H, V] by flash-linear-attention's kernel for packed sequences.

    Queries and keys are normalized there, and value heads share them.

    Args:
        query, key: [S, key heads, K].
        value: [S, H, V].
        decay: [S, H] in float32, at most 0.
        strength: [S, H], within 0 and 1.
        pack: has the ends of the sequences.
    """
    modules: Any = import_module("fla.ops.gated_delta_rule")
    rule: Callable[..., tuple[Tensor, None]] = modules.chunk_gated_delta_rule
    one_batch = [x.unsqueeze(0) for x in (query, key, value, decay, strength.float())]
    output, _ = rule(
        *one_batch,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=pack.cu_seqlens_q,
        cu_seqlens_cpu=torch.from_numpy(pack.shape.cu_seqlens),  # it would wait for the device
    )
    return output.squeeze(0)


def _by_rectangle(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    strength: Tensor,
    arrangement: Arrangement,
) -> Tensor:
    """Returns the outputs [S, H, V] in float32; padding at the ends is not read back."""
    sizes = [sequences * length for sequences, length in arrangement.rectangles]
    split: list[tuple[Tensor, ...]] = []
    for x in (query, key, value, decay, strength):
        split.append(arrangement.spread(x.float()).split(sizes))
    parts: list[Tensor] = []
    for rectangle, *tensors in zip(arrangement.rectangles, *split, strict=True):
        of_heads = [x.unflatten(0, rectangle).transpose(1, 2) for x in tensors]
        output = delta_rule(*of_heads)
        parts.append(output.transpose(1, 2).flatten(0, 1))
    return arrangement.collect(torch.cat(parts))


def delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor) -> Tensor:
    """Returns what queries read of a state [K, V] that each position decays and corrects.

    Within a chunk, the corrections of all positions are the solution of a triangular system; the state
    goes from chunk to chunk. Sums are in the dtype of the arguments.

    Args:
        query, key: [B, H, L, K], which are normalized here.
        value: [B, H, L, V].
        decay: [B, H, L], at most 0.
        strength: [B, H, L], within 0 and 1.

    Returns:
        [B, H, L, V].
    """
    length = query.shape[2]
    query = _unit(query) * query.shape[-1] ** -0.5
    key = _unit(key)
    columns = torch.cat([value, key], dim=-1)
    columns = columns * strength.unsqueeze(-1)

    # Chunks of equal lengths need little padding: [B, H, N, C, ...].
    chunks = math.ceil(length / DELTA_CHUNK)
    chunk = math.ceil(length / chunks)
    query = _chunks(query, chunk)
    key = _chunks(key, chunk)
    columns = _chunks(columns, chunk)
    decays = _chunks(decay.unsqueeze(-1), chunk).squeeze(-1)
    decays = decays.cumsum(-1)

    # From an earlier position of a chunk to a later one [..., later, earlier], from the chunk's start to a
    # position, and from a position to the chunk's end.
    future = torch.ones(chunk, chunk, dtype=torch.bool, device=query.device).triu(1)
    between = decays.unsqueeze(-1) - decays.unsqueeze(-2)
    between = between.masked_fill(future, -torch.inf)
    between = between.exp()
    since_start = decays.exp().unsqueeze(-1)
    until_end = decays[..., -1:] - decays
    until_end = until_end.exp().unsqueeze(-1)

    # What each position writes, as if the chunk began with an empty state, and what it takes off for each
    # unit of the state that the chunk begins with.
    values, keys = columns.split((value.shape[-1], query.shape[-1]), dim=-1)
    system = keys @ key.mT
    system = system * between
    right = torch.cat([values, keys * since_start], dim=-1)
    solved = torch.linalg.solve_triangular(
        system,
        right,
        upper=False,
        unitriangular=True,
    )
    written, read = solved.split((value.shape[-1], query.shape[-1]), dim=-1)

    scores = query @ key.mT
    scores = scores * between
    query = query * since_start
    key = key * until_end

    # [B, H, K, V]
    state = query.new_zeros(*query.shape[:2], query.shape[-1], value.shape[-1])
    outputs: list[Tensor] = []
    for n in range(chunks):
        new = written[:, :, n] - read[:, :, n] @ state
        output = query[:, :, n] @ state + scores[:, :, n] @ new
        outputs.append(output)
        decayed = state * since_start[:, :, n, -1:]
        state = decayed + key[:, :, n].mT @ new
    whole = torch.cat(outputs, dim=2)
    return whole[:, :, :length]


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPSILON)


def _chunks(x: Tensor, size: int) -> Tensor:
    """[B, H, L, D] -> [B, H, N, C, D], padded with zeros at the end."""
    padded = F.pad(x, (0, 0, 0, -x.shape[2] % size))
    return padded.unflatten(2, (-1, size))
