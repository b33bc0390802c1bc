"""The sizes of a model by the names that its kind of config.json has for them."""

from __future__ import annotations

import pytest

from megarl.config.rules.model_rules import required_fields, size_of


@pytest.mark.parametrize("field", ["num_experts", "num_local_experts"])
def test_qwen3s_experts_are_counted_by_either_name(field: str) -> None:
    """transformers 4 and 5 write them differently."""
    hf = {"model_type": "qwen3_moe", field: 128}
    size = size_of(hf, "experts")
    assert size is not None
    assert (size.field, size.value) == (field, 128)
    assert field in required_fields(hf)
