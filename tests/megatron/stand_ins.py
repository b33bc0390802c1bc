"""Modules with the parameters of Transformer Engine's, and Megatron's own arithmetic, so that they run on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from megarl.data.packing import PackShape
from megarl.megatron.attention import PackedAttention, PackParams, pack_arrays
from megarl.megatron.model import LayerNorm, RMSNorm, rms_norm
from megarl.megatron.platform import kernels
from megarl.megatron.staging import to_device


def _modules() -> Any:
    """A provider of modules as Megatron's of Transformer Engine."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.enums import AttnMaskType

    class Norm:
        def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5) -> Any:
            return (RMSNorm if config.normalization == "RMSNorm" else LayerNorm)(config, hidden_size, eps)

    class NormLinear(ColumnParallelLinear):
        """The norm's parameters are the linear layer's own, after the others."""

        def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
            super().__init__(input_size, output_size, config=config, **options)
            norm, self.eps = Norm(config, input_size, config.layernorm_epsilon), config.layernorm_epsilon
            self.layer_norm_weight, self.layer_norm_bias = norm.weight, getattr(norm, "bias", None)

        def forward(self, hidden: torch.Tensor, *args: Any, **options: Any) -> Any:
            weight, bias = self.layer_norm_weight, self.layer_norm_bias
            if bias is None:
                normed = rms_norm(hidden, weight, self.eps)
            else:
                normed = F.layer_norm(hidden, weight.shape, weight, bias, self.eps)
            return super().forward(normed, *args, **options)

    class Attention(torch.nn.Module):
        def __init__(self, *, attention_type: str, pg_collection: Any, **arguments: Any) -> None:
            super().__init__()
            assert attention_type == "self"
            assert pg_collection.tp is not None
            assert pg_collection.cp is not None
            self.own = PackedAttention(**arguments)

        def forward(
            self,
            *tensors: Any,
            attn_mask_type: AttnMaskType,
            packed_seq_params: PackedSeqParams,
            attention_bias: Any = None,
        ) -> Any:
            pack = packed_seq_params
            assert type(pack) is PackedSeqParams
            assert pack.qkv_format == "thd"
            assert pack.cu_seqlens_q_padded is pack.cu_seqlens_kv_padded is attention_bias is None
            assert pack.cu_seqlens_q.dtype == pack.cu_seqlens_kv.dtype == torch.int32
            assert pack.max_seqlen_q == pack.max_seqlen_kv == pack.cu_seqlens_q.diff().max()
            assert attn_mask_type == AttnMaskType.causal
            shape = PackShape(cu_seqlens=pack.cu_seqlens_q.numpy(), max_seqlen=pack.max_seqlen_q)
            return self.own(
                *tensors, packed_seq_params=PackParams.of(shape, to_device(pack_arrays(shape), tensors[0].device))
            )

    class Provider(LocalSpecProvider):
        def fuse_layernorm_and_linear(self) -> bool:
            return True

        def column_parallel_layer_norm_linear(self) -> type:
            return NormLinear

        def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
            return Norm

        def core_attention(self) -> type:
            return Attention

    return Provider


@contextmanager
def transformer_engine() -> Iterator[None]:
    """Models can be built with ``layers="transformer_engine"``."""
    from megatron.core.models.gpt import gpt_layer_specs

    with (
        patch.object(gpt_layer_specs, "TESpecProvider", _modules(), create=True),
        patch.object(kernels, "device_refusals", lambda _: []),
        patch.object(kernels, "refusals", lambda *_: []),
    ):
        yield
