"""RMSNorm for the layer spec: Megatron's stock norm without Transformer Engine refuses sequence parallelism."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight, computed in float32 and rounded before the weight as Hugging Face's Qwen2 and Llama do.

    Under sequence parallelism each TP rank sees a part of the tokens; the weight is marked so that
    ``finalize_model_grads`` adds its gradients over the TP group.

    Args:
        config: gives ``params_dtype`` and ``sequence_parallel``.
        hidden_size: of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_float = x.float()
        scale = torch.rsqrt(x_float.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (x_float * scale).to(x.dtype)
