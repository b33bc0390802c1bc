"""Fields of a model's decoder in a ``config.json`` of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

TEXT_CONFIG = "text_config"
"""Field with the decoder's fields, of models that have more than a decoder."""


def decoder_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the fields of a model's decoder: those of ``text_config``, where a config has one.

    Its classes, dtype, quantization and tie are the whole model's.
    """
    text = config.get(TEXT_CONFIG)
    if not isinstance(text, Mapping):
        return config
    fields: dict[str, Any] = dict(cast(Mapping[str, Any], text))
    dtypes = ("dtype", "torch_dtype")
    if any(config.get(name) is not None for name in dtypes):
        for name in dtypes:
            fields.pop(name, None)
    for name in ("architectures", "model_type", "quantization_config", *dtypes):
        if config.get(name) is not None:
            fields[name] = config[name]
    fields["tie_word_embeddings"] = config.get("tie_word_embeddings", False)
    return fields
