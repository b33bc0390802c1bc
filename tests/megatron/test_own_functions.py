"""Custom functions give the same experience as equal built-in ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.megatron.test_experience import build

HERE = "tests.own_functions"
KL = {"in": "reward", "coef": 0.1}


@pytest.mark.parametrize(
    ("own", "ours"),
    [
        (
            {"advantage": {"name": f"{HERE}:same_gae", "level": "token", "args": {"lam": 0.7}}},
            {"advantage": {"name": "gae", "lam": 0.7}, "normalise": {"advantages": "none"}},
        ),
        (
            {"normalise": {"advantages": f"{HERE}:same_levels"}},
            {"normalise": {"advantages": {"name": "levels", "std": "group"}}},
        ),
        ({"kl": {**KL, "estimator": f"{HERE}:same_k2"}}, {"kl": {**KL, "estimator": "k2"}}),
        (
            {"correction": {"weights": {"name": f"{HERE}:same_truncation", "args": {"upper": 1.1}}}},
            {"correction": {"weights": {"name": "token_truncate", "upper": 1.1}}},
        ),
    ],
    ids=["advantage", "normaliser", "estimator", "weights"],
)
def test_custom_functions_give_the_same_experience(own: dict[str, Any], ours: dict[str, Any]) -> None:
    one, other, plain = (build(algo)[0] for algo in (own, ours, {}))
    for name in ("advantages", "returns", "weights"):
        for i, chunk in one.items():
            mine, theirs = getattr(chunk, name), getattr(other[i], name)
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert np.array_equal(mine.values, theirs.values)
    told = [(chunk.advantages.values.tolist(), chunk.weights is None) for chunk in one.values()]
    assert told != [(chunk.advantages.values.tolist(), chunk.weights is None) for chunk in plain.values()]
