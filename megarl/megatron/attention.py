"""Core attention over packed sequences (THD), which Megatron leaves to Transformer Engine: a slot of the layer spec."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig

try:
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]
except ImportError:
    flash_attn_varlen_func = None


class PackedAttention(torch.nn.Module):
    """Causal attention within each sequence of a pack, with grouped KV heads.

    flash-attn's varlen kernel where it is installed and the tensors are half precision on CUDA; otherwise one
    ``scaled_dot_product_attention`` per sequence. The parameters are those with which Megatron's ``Attention``
    builds this slot.
    """

    def __init__(self, *, config: TransformerConfig, softmax_scale: float | None = None, **_unused: Any) -> None:
        super().__init__()
        assert config.kv_channels is not None
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_seq_params: PackedSeqParams,
        **_unused: Any,
    ) -> torch.Tensor:
        """Attends within sequences.

        Args:
            query: [S, query heads, head dim].
            key, value: [S, KV heads, head dim].
            attention_mask: None; the sequences' ends say it all.
            packed_seq_params: ``cu_seqlens_q`` int32 [sequences + 1], from 0 to S.

        Returns:
            [S, query heads * head dim].
        """
        assert attention_mask is None, "packed attention takes its mask from cu_seqlens"
        if flash_attn_varlen_func is not None and query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
            output = flash_attn_varlen_func(
                query,
                key,
                value,
                packed_seq_params.cu_seqlens_q,
                packed_seq_params.cu_seqlens_kv,
                packed_seq_params.max_seqlen_q,
                packed_seq_params.max_seqlen_kv,
                softmax_scale=self.scale,
                causal=True,
            )
            return output.flatten(1)
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        parts = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
        return torch.cat([self._one_sequence(q, k, v) for q, k, v in parts])

    def _one_sequence(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[L, heads, dim] each -> [L, query heads * dim]."""
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.squeeze(0).transpose(0, 1).flatten(1)
