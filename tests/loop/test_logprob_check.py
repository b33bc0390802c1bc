"""The comparison of trainer and engine log-probabilities: sequences, metrics and error."""

from __future__ import annotations

import numpy as np
import pytest

from megarl.config.schema import LogprobAgreement
from megarl.loop.logprob_check import DisagreementError, compare_logprobs, random_sequences
from megarl.types import Ragged

TRAINER = Ragged.from_rows([[-1.0, -2.0], [-3.0, -0.5]], np.float32)


def engine(*rows: list[float]) -> Ragged:
    return Ragged.from_rows(rows, np.float32)


def test_mean_and_maximum_cover_all_tokens_and_engines() -> None:
    metrics = compare_logprobs(TRAINER, [engine([-1.5, -2.0], [-3.0, -0.5]), engine([-1.0, -2.25], [-2.75, -0.5])], 0.2)
    assert metrics == {"sync/logprob_mean_abs_diff": 1.0 / 8, "sync/logprob_max_abs_diff": 0.5}


def test_an_error_names_the_engines_that_disagree() -> None:
    agreeing = engine([-1.0, -2.0], [-3.0, -0.5])
    off = engine([-1.0, -2.0], [-3.0, -4.5])
    with pytest.raises(DisagreementError, match=r"Engine 1: mean absolute difference 1 .*, allowed are 0\.9") as caught:
        compare_logprobs(TRAINER, [agreeing, off, agreeing], 0.9)
    assert "maximum 4, where the trainer has -0.5000 and the engine -4.5000" in str(caught.value)
    assert "Engine 0" not in str(caught.value)
    with pytest.raises(DisagreementError, match="mean absolute difference nan"):
        compare_logprobs(TRAINER, [engine([-1.0, float("nan")], [-3.0, -0.5])], 10.0)


def test_the_sequences_are_random_and_determined_by_the_seed() -> None:
    agreement = LogprobAgreement(sequences=200, tokens=8)
    first, again = (random_sequences(agreement, vocab=50, longest=8, seed=3) for _ in range(2))
    assert [ids.tolist() for ids in first] == [ids.tolist() for ids in again]
    assert [ids.tolist() for ids in first] != [
        ids.tolist() for ids in random_sequences(agreement, vocab=50, longest=8, seed=4)
    ]
    assert {len(ids) for ids in first} == set(range(2, 9))
    assert len(first[0]) == 8
    assert {int(token) for ids in first for token in ids} == set(range(50))


def test_the_shortest_sequence_has_one_log_probability() -> None:
    sequences = random_sequences(LogprobAgreement(sequences=3, tokens=2), vocab=9, longest=2, seed=0)
    assert [len(ids) for ids in sequences] == [2, 2, 2]
