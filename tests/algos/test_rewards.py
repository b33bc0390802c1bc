"""Token rewards: by hand, and their sums."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from megarl.algos.reward_shaping import dense_rewards, first_end, kl_penalties, token_rewards
from tests.algos.inputs import NAN, fractions, lengths, lengths_mask, numbers, seeds


@given(lengths, fractions, seeds)
def test_rewards_sum_to_score_minus_kl(lengths: list[int], coef: float, seed: int) -> None:
    mask, rows = lengths_mask(lengths, 6), len(lengths)
    scores, kl = numbers(rows, seed=seed), numbers(rows, 6, seed=seed + 1)
    rewards = token_rewards(scores, kl_penalties(torch.where(mask, kl, NAN), mask, kl_coef=coef), mask)
    for i, n in enumerate(lengths):
        expected = (scores[i] - coef * kl[i, :n].sum()).item() if n else 0.0
        assert rewards[i].sum().item() == pytest.approx(expected, abs=1e-9)
        if n:
            assert rewards[i, n - 1].item() == pytest.approx((scores[i] - coef * kl[i, n - 1]).item(), abs=1e-9)


def test_the_score_is_placed_as_configured() -> None:
    mask = torch.tensor([[1, 0, 1, 0, 0], [0] * 5, [1] * 5, [1, 1, 1, 1, 0]]).bool()
    scores, nothing = torch.tensor([2.0, 3.0, 5.0, 7.0]), torch.zeros(4, 5)
    places = {
        "last_valid": [[0, 0, 2, 0, 0], [0] * 5, [0, 0, 0, 0, 5], [0, 0, 0, 7, 0]],
        "every_valid": [[2, 0, 2, 0, 0], [0] * 5, [5] * 5, [7, 7, 7, 7, 0]],
    }
    for placement, expected in places.items():
        assert token_rewards(scores, nothing, mask, placement=placement).tolist() == expected
    empty = torch.zeros(2, 0)
    for placement in places:
        assert token_rewards(torch.ones(2), empty, empty.bool(), placement=placement).shape == (2, 0)


@given(lengths.filter(any), seeds)
def test_dense_differences_sum_to_last_minus_first_score(lengths: list[int], seed: int) -> None:
    mask, rows = lengths_mask(lengths, 6), len(lengths)
    dense, penalties = numbers(rows, 7, seed=seed), torch.zeros(rows, 6).double()
    earned = dense_rewards(dense[:, :-1], dense[:, 1:], penalties, mask, differences=True)
    absolute = dense_rewards(dense[:, :-1], dense[:, 1:], penalties, mask, clip=(-0.5, 0.5))
    for i, n in enumerate(lengths):
        assert earned[i].sum().item() == pytest.approx((dense[i, n] - dense[i, 0]).item(), abs=1e-9)
        assert absolute[i, :n].tolist() == [min(max(s, -0.5), 0.5) for s in dense[i, 1 : n + 1].tolist()]
        assert not absolute[i, n:].any()


# ---- pitfalls


def test_p1_the_reward_is_on_the_end_token_even_if_it_is_the_pad_token() -> None:
    """DeepSpeed-Chat masks padding tokens, so it loses the end token and rewards one position late."""
    end = pad = 2
    responses = torch.tensor([[5, 6, end, pad, pad], [5, 6, 7, 8, 9]])
    kept, found = first_end(responses, torch.ones_like(responses).bool(), [end])
    rewards = token_rewards(torch.tensor([1.0, 4.0]), torch.zeros(2, 5), kept)
    assert rewards.tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 0, 4]]
    assert found.tolist() == [True, False]


def test_p17_the_penalty_is_subtracted() -> None:
    """The text of a published walk-through adds it; its numbers, and every system, subtract it."""
    kl = torch.tensor([[-0.3315, -0.0426, 0.6351]])
    mask = torch.ones(1, 3).bool()
    rewards = token_rewards(torch.tensor([0.4]), kl_penalties(kl, mask, kl_coef=0.15), mask)
    assert rewards[0].tolist() == pytest.approx([0.049725, 0.00639, 0.304735], abs=1e-6)
    assert not kl_penalties(kl, mask, kl_coef=-0.15).any()
