"""Rotary embeddings as transformers computes them, for Megatron's attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megarl.lazy_compiling import distributions_by_records
from megarl.models import ModelSpec
from megarl.models.rope import Rope


def rotations(spec: ModelSpec, rope: Rope) -> tuple[Tensor, float]:
    """Returns the angle of each pair of rotated elements per position, and the scale of cosines and sines.

    Returns:
        Radians, [rotated elements / 2] float32; on the CPU, as transformers and vLLM compute them.
    """
    dims = spec.dims
    if rope.kind == "default":
        width = int(dims.rotary_dim * rope.share)
        return 1 / rope.base ** (torch.arange(0, width, 2, dtype=torch.float32) / width), 1.0
    with distributions_by_records():
        from transformers import PretrainedConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    fields: dict[str, Any] = {
        "rope_parameters": dict(rope.parameters),
        "head_dim": dims.rotary_dim,
        "hidden_size": dims.hidden,
        "num_attention_heads": dims.heads,
        "max_position_embeddings": dims.positions,
    }
    length: int | None = None
    if rope.long and rope.original is not None:
        length = rope.original + 1
    return ROPE_INIT_FUNCTIONS[rope.kind](PretrainedConfig(**fields), torch.device("cpu"), seq_len=length)
