"""What some kinds of attention layers have beside Megatron's: norms after attention and MLP, and rope of their own."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from megarl.megatron.attention import PackParams


class PostNormLinear(RowParallelLinear):
    """The last projection of an attention or an MLP, whose output is normalized before the residual is added.

    Megatron's layer (0.19) has no place for the norm.

    Args:
        norm: class of the norm.
    """

    def __init__(self, input_size: int, output_size: int, *, norm: Any, config: Any, **arguments: Any) -> None:
        super().__init__(input_size, output_size, config=config, **arguments)
        self.post_layernorm = norm(config=config, hidden_size=output_size, eps=config.layernorm_epsilon)
        self.register_forward_hook(_normalized)  # after an adapter's hook


def _normalized(
    linear: Any,
    _inputs: tuple[Tensor, ...],
    output: tuple[Tensor, None],
) -> tuple[Tensor, None]:
    product, bias = output
    assert bias is None
    return linear.post_layernorm(product), None


class LocalRopeAttention(SelfAttention):
    """Attention with the rotations of layers with windows, which ``PackParams`` has."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: PackParams,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As Megatron's; ``rotary_pos_emb`` is that of the other layers."""
        return super().forward(
            hidden_states,
            attention_mask,
            rotary_pos_emb=packed_seq_params.local_angles,
            packed_seq_params=packed_seq_params,
            **options,
        )
