"""Scores and truncation of responses: by hand, and against naive loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algos.reward_shaping import (
    ScoreScale,
    clip_scores,
    first_end,
    head_std,
    keep_finished,
    replace_missing_end,
    scale_missing_end,
    score_scale,
    subtract_missing_end,
    zero_missing_end,
)
from megarl.rewards.functions import soft_overlong
from tests.algos.inputs import lengths_mask
from tests.oracle import scores as naive
from tests.oracle.models import Sample
from tests.rewards.completions import completion

SCORES, FINISHED = torch.tensor([2.0, -2.0, 0.5]), torch.tensor([True, False, False])


def test_the_five_rules_for_unfinished_responses() -> None:
    assert replace_missing_end(SCORES, FINISHED).tolist() == [2.0, -1.0, -1.0]
    assert subtract_missing_end(SCORES, FINISHED, penalty=1.0).tolist() == [2.0, -3.0, -0.5]
    assert scale_missing_end(SCORES, FINISHED, factor=0.25).tolist() == [2.0, -0.5, 0.125]
    assert zero_missing_end(SCORES, FINISHED).tolist() == [2.0, 0.0, 0.0]
    assert clip_scores(SCORES, -1.0, 1.0).tolist() == [1.0, -1.0, 0.5]
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    assert keep_finished(mask, FINISHED).tolist() == [[True, True], [False, False], [False, False]]


@given(st.integers(1, 40), st.integers(1, 20), st.integers(0, 10), st.floats(0, 2))
def test_the_length_penalty_equals_the_oracles(tokens: int, buffer: int, more: int, factor: float) -> None:
    sample = Sample(sample_id="", prompt_ids=[0], response_ids=[0] * tokens)
    limits = {"max_tokens": buffer + more, "buffer_tokens": buffer, "penalty": factor}
    expected = naive.overlong(0.0, sample, most=buffer + more, buffer=buffer, factor=factor)
    response = completion(tokens=tokens)
    assert soft_overlong(response, **limits) == pytest.approx(expected)
    falling = soft_overlong(response, **limits, capped=False)
    assert falling <= soft_overlong(response, **limits) <= 0
    if tokens <= buffer + more:
        assert falling == pytest.approx(expected)


def test_reference_samples_get_the_configured_mean_and_deviation() -> None:
    raw = 5 + 3 * torch.randn(512, generator=torch.Generator().manual_seed(0))
    for mean, std, ddof in ((0.0, 1.0, 0), (2.0, 0.5, 1)):
        scale = score_scale(raw, target_mean=mean, target_std=std, ddof=ddof)
        scaled = scale.apply(raw.double())
        assert scaled.mean().item() == pytest.approx(mean, abs=1e-9)
        assert scaled.std(correction=ddof).item() == pytest.approx(std)
        torch.testing.assert_close(scale.gain * raw.double() + scale.bias, scaled)
    assert torch.equal(ScoreScale().apply(raw), raw)


@pytest.mark.parametrize("scores", [[], [0.1], [0.1, 0.1, 0.1]])
def test_scores_without_a_scale_are_refused(scores: list[float]) -> None:
    with pytest.raises(ValueError, match="without two different scores"):
        score_scale(torch.tensor(scores))


def test_initial_standard_deviation_of_heads() -> None:
    assert head_std(768) == pytest.approx(0.036061, abs=1e-6)
    assert head_std(768, rule="inverse") == pytest.approx(0.001300, abs=1e-6)


# ---- where responses end


@given(st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=4), st.integers(0, 6))
def test_the_first_end_token_equals_a_loops(rows: list[list[int]], after: int) -> None:
    lengths = [1 + sum(row) % 5 for row in rows]
    kept, found = first_end(torch.tensor(rows), lengths_mask(lengths, 5), [2], after=after)
    for i, (row, n) in enumerate(zip(rows, lengths, strict=True)):
        sample = naive.truncated(Sample(sample_id="", prompt_ids=[0], response_ids=row[:n]), 2, after)
        assert found[i].item() == sample.finished
        assert kept[i].tolist() == [t < len(sample.response_ids) for t in range(5)]


def test_any_of_several_stop_tokens_ends_a_response() -> None:
    ids = torch.tensor([[5, 7, 6, 5], [5, 5, 6, 7]])
    assert first_end(ids, torch.ones(2, 4).bool(), [6, 7])[0].sum(-1).tolist() == [2, 3]
