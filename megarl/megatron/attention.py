"""Attention over packed sequences (THD): torch's, for which Megatron needs Transformer Engine, and that.

Shape legend: S positions of the pack, P places of an arrangement, H query heads, K KV heads, D head
dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.data.packing import PackShape
from megarl.megatron.staging import Arrays, Places, to_device
from megarl.types import Int64Array

LENGTH_STEP = 16
"""Sequences whose lengths round up to the same multiple share a rectangle.

A call costs many times the attention in a short sequence; a larger step pads more."""

HEAD_STEP = 8
LARGEST_HEAD = 256
"""torch's variable-length kernel takes head sizes that are multiples of the first, up to the second (2.13)."""


@dataclass(frozen=True, kw_only=True)
class Arrangement(Places):
    """The sequences of a pack in a few rectangles, whose rows are padded at their ends to one length.

    Args:
        rectangles: (sequences, length) of each; together they have P places of S positions.
        masks: those of ``PackedAttention``, by length, positions before its own that a query sees, and
            whether there are sinks. Layers of a kind share one, as kernels keep it for the backward pass.
    """

    rectangles: tuple[tuple[int, int], ...]
    masks: dict[tuple[int, int, bool], Tensor] = field(default_factory=dict[tuple[int, int, bool], Tensor])


def arrange(shape: PackShape, device: torch.device) -> Arrangement:
    starts = shape.cu_seqlens[:-1, None].astype(np.int64)
    lengths = np.diff(shape.cu_seqlens)[:, None]
    total = int(shape.cu_seqlens[-1])
    steps = -(-lengths[:, 0] // LENGTH_STEP)
    rectangles: list[tuple[int, int]] = []
    positions: list[Int64Array] = []
    for step in np.unique(steps):
        members = steps == step
        columns = np.arange(lengths[members].max())
        rectangles.append((int(members.sum()), len(columns)))
        places = np.where(columns < lengths[members], starts[members] + columns, total)
        positions.append(places.ravel())
    position_of = np.concatenate(positions)
    place_of = np.argsort(position_of, kind="stable")[:total]
    indices = to_device({"position_of": position_of, "place_of": place_of}, device)
    return Arrangement(
        rectangles=tuple(rectangles),
        position_of=indices["position_of"],
        place_of=indices["place_of"],
    )


def pack_arrays(shape: PackShape) -> Arrays:
    """Returns what a pack's attention and rope read on the device; see ``PackParams``."""
    starts = np.repeat(shape.cu_seqlens[:-1], np.diff(shape.cu_seqlens)).astype(np.int64)
    return {"cu_seqlens": shape.cu_seqlens, "positions": np.arange(len(starts)) - starts}


@dataclass(kw_only=True)
class PackParams(PackedSeqParams):
    """The parameters of a pack, which Megatron passes through the layers to rope and attention.

    Rope sees one sequence, for which ``PackedModel`` looks up the table by ``positions``: Megatron
    would number the positions of many sequences one by one, in each layer.

    Args:
        positions: [S] int64, each position's index in its sequence.
        sequences: without rope's ends, which Transformer Engine would take for padding.
        routes: [S, layers with experts of this rank, experts of a token], recorded ones; None: none.
        local_angles: [S, 1, 1, D] float32, angles of layers with windows that have their own; ``PackedModel`` sets it.
    """

    shape: PackShape
    positions: Tensor
    sequences: PackedSeqParams
    routes: Tensor | None = None
    local_angles: Tensor | None = None

    @classmethod
    def of(cls, shape: PackShape, tensors: Mapping[str, Tensor]) -> PackParams:
        """Returns the parameters of a pack whose ``pack_arrays`` are on the device."""
        bounds = tensors["cu_seqlens"]
        # Rope reads it on the CPU.
        one_sequence = torch.tensor([0, shape.cu_seqlens[-1]], dtype=torch.int32, device="cpu")
        common: dict[str, Any] = {
            "qkv_format": "thd",
            "cu_seqlens_q": bounds,
            "cu_seqlens_kv": bounds,
            "max_seqlen_q": shape.max_seqlen,
            "max_seqlen_kv": shape.max_seqlen,
        }
        return cls(
            **common,
            cu_seqlens_q_padded=one_sequence,
            cu_seqlens_kv_padded=one_sequence,
            shape=shape,
            positions=tensors["positions"],
            sequences=PackedSeqParams(**common),
        )

    @cached_property
    def arrangement(self) -> Arrangement:
        return arrange(self.shape, self.positions.device)


class PackedAttention(torch.nn.Module):
    """Causal attention within each sequence of a pack, with grouped KV heads, maybe to a window of last positions.

    It uses torch's variable-length kernel where ``kernel_takes`` the heads, padded to a size that
    the kernel has; else, and for attention with sinks, one ``scaled_dot_product_attention`` per
    rectangle of an arrangement. Megatron's ``Attention`` makes it.

    A sink is a logit of each head, ``softmax_offset`` in Megatron, to which no value belongs.
    """

    def __init__(
        self,
        *,
        config: TransformerConfig,
        window: int | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_unused: Any,
    ) -> None:
        super().__init__()
        assert config.kv_channels is not None
        self.softmax_offset: Any = None
        if config.softmax_type == "learnable":
            assert pg_collection is not None
            heads = config.num_attention_heads // pg_collection.tp.size()
            sinks = torch.empty(heads, dtype=config.params_dtype, device=torch.cuda.current_device())
            self.softmax_offset = torch.nn.Parameter(sinks)
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        scale = softmax_scale
        if scale is None:
            scale = config.kv_channels**-0.5
        self.scale = scale
        self.earlier = -1  # positions before its own that a query sees; -1: all
        if window is not None:
            self.earlier = window - 1

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackParams,
        **_unused: Any,
    ) -> Tensor:
        """[S, H, D], twice [S, K, D] -> [S, H * D]; values may be narrower; ``attention_mask`` is None."""
        assert attention_mask is None, "packed attention takes its mask from the sequences' ends"
        width = value.shape[2]
        if narrower := query.shape[2] - width:
            value = F.pad(value, (0, narrower))
        if kernel_takes(query) and self.softmax_offset is None:
            output = self._variable_length(query, key, value, packed_seq_params)
        else:
            output = self._by_rectangle(query, key, value, packed_seq_params.arrangement)
        return output[..., :width].flatten(1)

    def _variable_length(self, query: Tensor, key: Tensor, value: Tensor, pack: PackParams) -> Tensor:
        # It imports torch's compiler, which takes a third of a second.
        from torch.nn.attention.varlen import varlen_attn

        gqa = query.shape[1] != key.shape[1]
        if missing := -query.shape[2] % HEAD_STEP:
            query, key, value = (F.pad(x, (0, missing)) for x in (query, key, value))
        output: Any = varlen_attn(
            query,
            key,
            value,
            pack.cu_seqlens_q,
            pack.cu_seqlens_kv,
            pack.shape.max_seqlen,
            pack.shape.max_seqlen,
            scale=self.scale,
            window_size=(self.earlier, 0),
            enable_gqa=gqa,
        )
        return output

    def _by_rectangle(self, query: Tensor, key: Tensor, value: Tensor, arrangement: Arrangement) -> Tensor:
        """Causal attention does not see padding at the ends; the outputs of padding are not read."""
        gqa = query.shape[1] != key.shape[1]
        if self.softmax_offset is not None and query.is_cuda:
            # Of torch's kernels with a mask, the one that keeps no products of all positions takes no groups.
            key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
            value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
            gqa = False
        sizes = [sequences * length for sequences, length in arrangement.rectangles]
        split: list[Sequence[Tensor]] = []
        for x in (query, key, value):
            split.append(arrangement.spread(x).split(sizes))
        parts: list[Tensor] = []
        for rectangle, *qkv in zip(arrangement.rectangles, *split, strict=True):
            q, k, v = (x.unflatten(0, rectangle).transpose(1, 2) for x in qkv)
            mask = self._mask(rectangle[1], q, arrangement)
            if self.softmax_offset is not None:
                q, k, v = self._with_sinks(q, k, v)
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                scale=self.scale,
                enable_gqa=gqa,
            )
            parts.append(out[..., : value.shape[2]].transpose(1, 2).flatten(0, 1))
        return arrangement.collect(torch.cat(parts))

    def _with_sinks(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Adds a key that all positions see, whose product with a query is its head's sink, and whose value is 0.

        Tensors are [sequences, heads, length, D], and wider after it: by 1, on a GPU to a size that
        kernels take. A sink belongs to a query's head, and many of these share a key: so the queries
        have the sinks as element D, and the key has the inverse scale there.
        """
        width = q.shape[-1]
        wider = 1
        if q.is_cuda:
            wider = HEAD_STEP - width % HEAD_STEP
        q = F.pad(q, (0, wider))
        q[..., width] = self.softmax_offset[:, None]
        k = F.pad(k, (0, wider, 0, 1))
        k[..., -1, width] = 1 / self.scale
        return q, k, F.pad(v, (0, wider, 0, 1))

    def _mask(self, length: int, query: Tensor, arrangement: Arrangement) -> Tensor | None:
        """Returns 0 where a position of a rectangle sees another, else -inf; None where it sees all before it.

        [length, length], and a column of 0 for the sinks.

        Args:
            length: of the rectangle's rows.
            query: has the dtype and the device.
            arrangement: keeps masks for the layers that follow.
        """
        sinks = self.softmax_offset is not None
        earlier = length
        if 0 <= self.earlier < length - 1:
            earlier = self.earlier
        elif not sinks:
            return None
        mask = arrangement.masks.get((length, earlier, sinks))
        if mask is None:
            seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(-earlier)
            seen = F.pad(seen, (0, int(sinks)), value=True)
            mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill_(~seen, -torch.inf)
            arrangement.masks[length, earlier, sinks] = mask
        return mask


class FusedPackedAttention(torch.nn.Module):
    """The same attention by Transformer Engine; ``kernel`` makes Megatron's wrapper of its ``DotProductAttention``."""

    def __init__(self, kernel: Callable[..., torch.nn.Module], **arguments: Any) -> None:
        super().__init__()
        self.kernel = kernel(**arguments)

    def forward(self, *tensors: Tensor | None, packed_seq_params: PackParams, **options: Any) -> Tensor:
        return self.kernel(*tensors, packed_seq_params=packed_seq_params.sequences, **options)


def kernel_takes(query: Tensor) -> bool:
    """Whether torch's variable-length kernel takes heads of this kind, if need be padded."""
    if not query.is_cuda or query.shape[-1] > LARGEST_HEAD:
        return False
    return query.dtype in (torch.float16, torch.bfloat16)
