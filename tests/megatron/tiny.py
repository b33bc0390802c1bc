"""Tiny Hugging Face models, and the naive way to bring one into a role: read everything, then cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megarl.types import Layout, RoleName

SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "dtype": "float32",
}


def hf_config(model_type: str, **fields: Any) -> dict[str, Any]:
    """Fields of a config.json."""
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **{**SIZES, "rope_theta": 10000.0, **fields}).to_dict()


def save_model(directory: Path, model_type: str = "qwen2", seed: int = 0, **fields: Any) -> Path:
    """Writes a random language model, with weights large enough that every part of it matters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **{**SIZES, "rope_theta": 10000.0, **fields})
    )
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(directory)
    return directory


def load_role(
    directory: Path,
    name: RoleName,
    layout: Layout,
    rank: int,
    cache: Any,
    *,
    trainable: bool,
    head: torch.Tensor | None,
    vocab_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    recompute: Any = "none",
) -> Any:
    """A role with the weights of an HF directory, cut by the shard map from whole tensors.

    Args:
        head: [1, hidden], the value or score head.
    """
    import json

    from safetensors.torch import load_file

    from megarl.megatron.role import Role
    from megarl.weights.specs import model_spec

    spec = model_spec(json.loads((directory / "config.json").read_text()))
    whole = load_file(directory / "model.safetensors")
    if head is not None:
        whole["score.weight"] = head
    role = Role(
        name,
        spec,
        layout,
        rank,
        cache,
        vocab_size=spec.dims.vocab if vocab_size is None else vocab_size,
        dtype=dtype,
        trainable=trainable,
        recompute=recompute,
    )
    local = {param: torch.zeros(info.shape) for param, info in role.shard_map.params.items()}
    for piece in role.shard_map.pieces:
        local[piece.param][piece.box.slices] = whole[piece.name][piece.region.slices]
    role.load(local)
    return role
