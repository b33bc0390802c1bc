"""Norms for the layer spec: Megatron's stock ones without Transformer Engine refuse sequence parallelism.

Under sequence parallelism each TP rank sees a part of the tokens; the parameters are marked so that
``finalize_model_grads`` adds their gradients over the TP group. Norms of single heads see all tokens of a part of the
heads, and are added there by their names.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight, computed in float32 and rounded before the weight as Hugging Face's Qwen2 and Llama do.

    Args:
        config: gives ``params_dtype`` and ``sequence_parallel``.
        hidden_size: of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _parameter(config, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_float = x.float()
        scale = torch.rsqrt(x_float.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (x_float * scale).to(x.dtype)


class LayerNorm(torch.nn.Module):
    """(x - mean(x)) / deviation(x) * weight + bias, as torch computes it.

    Args:
        config: gives ``params_dtype`` and ``sequence_parallel``.
        hidden_size: of the last dimension.
        eps: added to the variance.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight, self.bias = _parameter(config, hidden_size), _parameter(config, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def _parameter(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    """[size], unset until weights are imported."""
    values = torch.empty(size, dtype=config.params_dtype, device=torch.cuda.current_device())
    parameter = torch.nn.Parameter(values)
    parameter.sequence_parallel = config.sequence_parallel
    return parameter
