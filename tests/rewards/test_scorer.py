"""Scores of chunks, and the ways in which a user's function goes wrong."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from megarl.config.schema import RewardFunction
from megarl.rewards import RewardError, RuleScorer
from tests.rewards.answers import decode, own, prompt, rollout

PROMPTS = [prompt("pa", "a", answer="one"), prompt("pb", "b", answer="three"), prompt("pa", "a", answer="one")]
CHUNK = rollout(PROMPTS, ["one", "three", "five!"], [True, False, True])


def test_every_function_scores_every_sample_and_weights_are_left_to_others() -> None:
    functions = [RewardFunction(name="exact_match", weight=9.0), own("length", scale=0.5), own("seen")]
    scores = RuleScorer(functions, decode).score(CHUNK, PROMPTS)
    assert {label: column.tolist() for label, column in scores.items()} == {
        "exact_match": [1, 1, 0],
        "length": [1.5, 2.5, 2.5],
        "seen": [1, 1, 0],
    }
    assert all(column.dtype == np.float32 for column in scores.values())


def test_without_a_tokenizer_there_are_ids_and_no_text() -> None:
    scores = RuleScorer([RewardFunction(name="contains"), own("length")], None).score(CHUNK, PROMPTS)
    assert scores["contains"].tolist() == [0, 0, 0]
    assert scores["length"].tolist() == [3, 5, 5]


@pytest.mark.parametrize("value", [True, 2, np.float32(0.5), np.bool_(True), Fraction(1, 2), -3.0e38])
def test_any_finite_number_is_a_score(value: Any) -> None:
    rows = [prompt("p", returns=value)]
    scores = RuleScorer([own("anything")], None).score(rollout(rows, ["x"], [True]), rows)
    assert scores["anything"].tolist() == [np.float32(float(value))]


@pytest.mark.parametrize("value", [None, math.nan, -math.inf, 1e39, "1.0", [1.0], 1j])
def test_anything_else_is_refused_and_named(value: Any) -> None:
    rows = [prompt("ok", returns=1.0), prompt("bad", returns=value)]
    with pytest.raises(RewardError) as refused:
        RuleScorer([own("anything")], None).score(rollout(rows, ["x", "y"], [True, True]), rows)
    expected = f"reward function 'anything' returned {value!r} on prompt 'bad': it must return a finite number"
    assert str(refused.value) == expected


def test_a_failing_function_is_named_with_its_prompt_and_its_own_error() -> None:
    rows = [prompt("ok"), prompt("bad")]
    with pytest.raises(RewardError, match="'quotient' failed on prompt 'bad': ZeroDivisionError") as failed:
        RuleScorer([own("quotient", size=2)], None).score(rollout(rows, ["x", "yy"], [True, True]), rows)
    assert isinstance(failed.value.__cause__, ZeroDivisionError)
