"""Rotary embeddings of a config: what is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.models import model_spec
from tests.weights.models import llama_config, phi3_config

ORIGINAL = "original_max_position_embeddings"
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 16}
SHORT = "short_factor"
LONG = "long_factor"
LONGROPE = {"rope_type": "longrope", SHORT: [1.0, 2], LONG: [3.0, 4]}


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_old_and_new_configs_are_read_alike(key: str) -> None:
    theta = {"rope_theta": 5e5} if key == "rope_parameters" else {}
    config = llama_config(**{key: LLAMA3 | theta})
    config["rope_theta"] = None if theta else 5e5
    rope = model_spec(config).rope
    assert rope is not None
    assert (rope.kind, rope.base, rope.original) == ("llama3", 5e5, 64)
    assert rope.parameters["original_max_position_embeddings"] == 64, "transformers takes max_position_embeddings"
    config[key][ORIGINAL] = config[ORIGINAL] = 32
    rope = model_spec(config).rope
    assert rope is not None
    assert rope.original == 32
    config[ORIGINAL] = 33
    with pytest.raises(ValueError, match="33 is not 32, that of rope_parameters, which vLLM takes"):
        model_spec(config)


def test_longrope_takes_its_long_factors_where_sequences_may_be_longer_than_before() -> None:
    spec = model_spec(
        phi3_config(head_dim=None, rope_scaling=LONGROPE, original_max_position_embeddings=32, hidden_size=16)
    )
    long = [spec.for_lengths(longest).rope for longest in (32, 33)]
    assert [rope.long for rope in long if rope is not None] == [False, True]


@pytest.mark.parametrize(
    ("rope", "reason"),
    [
        (
            {"rope_type": "dynamic", "factor": 2.0},
            "rope_type: 'dynamic' is not supported; supported are",
        ),
        ({"rope_type": "su"}, "rope_type: 'su' is not supported"),
        ({"rope_type": ["yarn"]}, "rope_type: ['yarn'] is not supported"),
        ("yarn", "rope_parameters: 'yarn' does not hold keys and values"),
        ({"rope_theta": -1.0}, "rope_theta: -1.0 is not a number above 0"),
        ({"rope_theta": True}, "rope_theta: True is not a number above 0"),
        (
            {"mrope_section": [1, 1, 1]},
            "rope_parameters.mrope_section: [1, 1, 1] is not supported",
        ),
        ({"rope_dim": 4}, "rope_parameters.rope_dim: 4 is not supported"),
        ({"rope_type": "linear"}, "factor: None is not a number of at least 1"),
        ({"rope_type": "linear", "factor": 0.5}, "factor: 0.5 is not a number of at least 1"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor: nan is not a number of at least 1"),
        ({"rope_type": "linear", "factor": 2.0, "mscale": 1.0}, "mscale: 1.0 is not supported with rope_type linear"),
        (LLAMA3 | {"low_freq_factor": None}, "low_freq_factor: None is not a number above 0"),
        (LLAMA3 | {"low_freq_factor": 4.0}, "high_freq_factor: 4.0 is not above low_freq_factor, 4.0"),
        (LLAMA3 | {ORIGINAL: 0.5}, "original_max_position_embeddings: 0.5 is not a positive"),
        (YARN | {"factor": None}, "factor: None"),
        (YARN | {"beta_fast": "32"}, "beta_fast: '32' is not a number above 0"),
        (YARN | {"truncate": 1}, "truncate: 1 is neither true nor false"),
        (
            YARN | {"factor": 3.0},
            f"max_position_embeddings: 64 exceeds {ORIGINAL} x factor, 16 x 3",
        ),
        (
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor: 0.5 is not supported: transformers' llama",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(rope: Any, reason: str) -> None:
    with pytest.raises(ValueError, match="model is not supported:") as error:
        model_spec(llama_config(rope_parameters=rope))
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"partial_rotary_factor": 0.4}, "partial_rotary_factor: 0.4 rotates 1 of 4 elements, which is no even number"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor: 1.5 is not a number above 0 and of at most 1"),
        (
            {"rope_scaling": LONGROPE | {SHORT: [1.0]}},
            "short_factor: [1.0] is not a list of 2 numbers",
        ),
        (
            {"rope_scaling": LONGROPE | {LONG: [1.0, 0]}},
            "long_factor: [1.0, 0] is not a list of 2 numbers",
        ),
        (
            {"rope_scaling": LONGROPE, "rope_parameters": {"rope_theta": 1e4}},
            "is not what rope_parameters states; keep one of them",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type: 'linear' is not supported"),
        ({"rope_scaling": LONGROPE | {LONG: None}}, "long_factor: None is not a list of 2 numbers"),
        (
            {"rope_scaling": LONGROPE | {"long_mscale": 1.1}},
            "long_mscale: 1.1 is not supported with rope_type longrope",
        ),
        ({"rope_scaling": LONGROPE | {"factor": 2.0}}, "factor: 2.0 is not supported with rope_type longrope"),
        (
            {"rope_scaling": LONGROPE, "original_max_position_embeddings": 1},
            "original_max_position_embeddings: 1 is below",
        ),
    ],
)
def test_longrope_and_partial_rotations_are_checked(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match="model is not supported:") as error:
        model_spec(phi3_config(head_dim=None, hidden_size=16, **changes))
    assert reason in str(error.value)
