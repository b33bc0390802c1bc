"""The sizes of a model, whatever its kind of configuration calls them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

What = Literal["layers", "heads", "kv_heads", "hidden", "ffn", "positions", "experts"]

_USUAL: Mapping[What, str] = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "positions": "max_position_embeddings",
}

_OWN: Mapping[str, Mapping[What, str]] = {
    "gpt2": {
        "layers": "n_layer",
        "heads": "n_head",
        "hidden": "n_embd",
        "ffn": "n_inner",
        "positions": "n_positions",
    },
    "mixtral": {"experts": "num_local_experts"},
    "qwen3_moe": {"experts": "num_experts", "ffn": "moe_intermediate_size"},
}
"""Where a kind of model differs from the usual, by its model_type. A model without a name for them has no experts."""

_ALSO: Mapping[str, str] = {"num_experts": "num_local_experts"}
"""What fields are called by transformers from 5 on."""

_OPTIONAL: Mapping[str, tuple[What, ...]] = {"gpt2": ("ffn",)}
"""What a kind derives where its configuration is silent."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A size of a model, and the field of its config.json that gives it."""

    field: str
    value: int


def field_of(hf: Mapping[str, Any], what: What) -> str | None:
    """The field of a config.json that gives a size; None for experts of a model that has none."""
    own = _OWN.get(str(hf.get("model_type")), {})
    field = own.get(what) or _USUAL.get(what)
    also = _ALSO.get(field or "")
    return also if also in hf and field not in hf else field


def size_of(hf: Mapping[str, Any], what: What) -> Size | None:
    """A size as a config.json gives it; None where it gives none that could be one."""
    field = field_of(hf, what)
    value = None if field is None else hf.get(field)
    return Size(field=field, value=value) if field is not None and isinstance(value, int) and value > 0 else None


def needed_fields(hf: Mapping[str, Any]) -> list[str]:
    """The fields without which the sizes of a model of this kind are not known."""
    optional = _OPTIONAL.get(str(hf.get("model_type")), ())
    wanted: tuple[What, ...] = ("hidden", "ffn", "layers", "heads", "experts")
    fields = [field_of(hf, what) for what in wanted if what not in optional]
    return ["model_type", "vocab_size", *(field for field in fields if field is not None)]
