"""Small copies of a model: its config with fewer layers and channels, and random weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.models import ModelSpec, model_spec
from megarl.models.hf_config import Family

VOCABULARY = 256

_HEADS = 4
_HIDDEN = 128
_LIMITS = {
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
    "n_shared_experts": 2,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "linear_num_key_heads": 2,
    "sliding_window": 16,
    "n_group": 4,
    "topk_group": 2,
}
"""Largest values, by usual names; on a CPU vLLM's experts have channels in multiples of 32."""
_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "num_position_embeddings": 16,
}
_OF_LAYERS = ("layer_types", "mlp_layer_types")
"""Fields with an entry for each layer."""


def small_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config with a few layers, of all its kinds, and few heads and channels.

    Raises:
        ValueError: the model, or its small copy, is not supported.
    """
    spec = model_spec(config)
    small = {**config, "model_type": spec.family.model_type}
    if spec.family.has_text_config:
        decoder = _small_decoder(config["text_config"], spec)
        small |= {"text_config": decoder, "dtype": decoder["dtype"]}
        small.pop("torch_dtype", None)
        small["vision_config"] = {
            **config.get("vision_config", {}),
            **_VISION,
            "out_hidden_size": decoder["hidden_size"],
        }
    else:
        small = _small_decoder(small, spec)
    model_spec(small)
    return small


def _small_decoder(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    dims = spec.dims
    small = _with_defaults(config, spec.family)
    for field, largest in _LIMITS.items():
        for name in _names(spec.family, field):
            if type(small.get(name)) is int:
                small[name] = min(small[name], largest)
    groups = small.get("n_group") or 1
    if groups > 1:
        small["num_experts_per_tok"] = 2 * small["topk_group"]
        for name in _names(spec.family, "num_experts"):
            if name in small:
                small[name] = groups * max(2, _LIMITS["num_experts"] // groups)
    layers = _layers(spec)
    sizes = {
        "num_hidden_layers": layers,
        "num_attention_heads": _HEADS,
        "hidden_size": _HIDDEN,
        "num_key_value_heads": _HEADS if dims.kv_heads == dims.heads else min(dims.kv_heads, 2),
        "vocab_size": VOCABULARY,
    }
    if dims.mla is None and dims.heads * dims.head_dim == dims.hidden:
        sizes["hidden_size"] = _HEADS * dims.head_dim
    if dims.delta is not None:
        shared = min(dims.delta.value_heads // dims.delta.key_heads, 2)
        key_heads = min(dims.delta.key_heads, _LIMITS["linear_num_key_heads"])
        sizes["linear_num_value_heads"] = shared * key_heads
    for field, value in sizes.items():
        for name in _names(spec.family, field):
            if name in small:
                small[name] = value
    for name in _OF_LAYERS:
        if small.get(name) is not None:
            small[name] = small[name][:layers]
    if small.get("mlp_only_layers"):
        small["mlp_only_layers"] = [layer for layer in small["mlp_only_layers"] if layer < layers]
    small |= {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None, "dtype": "float32"}
    small.pop("torch_dtype", None)
    return small


def _with_defaults(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The config with the values that transformers has for fields that it lacks."""
    found = dict(config)
    for field, value in family.defaults.items():
        names = _names(family, field)
        if not any(name in config for name in names):
            found[names[0]] = value
    return found


def _names(family: Family, field: str) -> tuple[str, ...]:
    return family.fields.get(field, (field,))


def _layers(spec: ModelSpec) -> int:
    """The number of layers, with all kinds: at least four where the model has as many."""
    seen: set[object] = set()
    needed = 4
    for layer, kind in enumerate(spec.table.layers):
        if kind not in seen:
            seen.add(kind)
            needed = max(needed, layer + 1)
    return min(needed, spec.dims.layers)


def write_small_model(config: Mapping[str, Any], directory: Path) -> None:
    """Writes a model with random weights, each large enough that all of them matter."""
    import torch
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    spec = model_spec(config)
    fields = dict(config)
    hf_config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(0)
    lm_class = getattr(transformers, spec.family.lm_class)
    model = lm_class._from_config(hf_config, dtype=getattr(torch, spec.dtype))
    with torch.no_grad():
        for value in model.state_dict().values():
            if not value.is_floating_point():
                continue
            if value.dim() > 1:
                value.normal_(0.0, 1 / math.sqrt(spec.dims.hidden))
            else:  # of a norm, a bias, or of routing
                value.add_(0.1 * torch.randn_like(value))
    model.save_pretrained(directory)
