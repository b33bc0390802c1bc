"""Model sizes by the names in each kind of config.json."""

from __future__ import annotations

import pytest

from megarl.config.rules.model_rules import required_fields, size_of


@pytest.mark.parametrize("field", ["num_experts", "num_local_experts"])
def test_the_number_of_qwen3_experts_is_read_by_either_name(field: str) -> None:
    """transformers 4 and 5 write them differently."""
    hf = {"model_type": "qwen3_moe", field: 128}
    assert size_of(hf, "experts") == (field, 128)
    assert field in required_fields(hf)
