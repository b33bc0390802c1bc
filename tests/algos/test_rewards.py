"""Token rewards: by hand, and their sums."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from megarl.algos.advantages import broadcast_advantages, gae
from megarl.algos.group_advantages import Samples, dr_grpo
from megarl.algos.kl import k1
from megarl.algos.reward_shaping import clip_scores, dense_rewards, first_end, kl_penalties, token_rewards
from tests.algos.inputs import NAN, fractions, lengths, lengths_mask, masks, numbers, seeds


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


@given(masks, fractions, seeds)
def test_t10_penalties_sum_to_the_kl_of_the_sequence(rows: list[list[bool]], coef: float, seed: int) -> None:
    mask = torch.tensor(rows)
    kl = numbers(*mask.shape, seed=seed)
    penalties = kl_penalties(kl, mask, kl_coef=coef)
    for i, row in enumerate(rows):
        divergence = sum(kl[i, t].item() for t, counts in enumerate(row) if counts)
        assert penalties[i].sum().item() == pytest.approx(-coef * divergence, abs=1e-9)


def test_the_score_is_placed_as_configured() -> None:
    mask = torch.tensor([[1, 0, 1, 0, 0], [0] * 5, [1] * 5, [1, 1, 1, 1, 0]]).bool()
    scores, nothing = torch.tensor([2.0, 3.0, 5.0, 7.0]), torch.zeros(4, 5)
    places = {
        "last_valid": [[0, 0, 2, 0, 0], [0] * 5, [0, 0, 0, 0, 5], [0, 0, 0, 7, 0]],
        "every_valid": [[2, 0, 2, 0, 0], [0] * 5, [5] * 5, [7, 7, 7, 7, 0]],
    }
    for placement, expected in places.items():
        assert token_rewards(scores, nothing, mask, placement=placement).tolist() == expected


def test_a_batch_without_columns_has_no_rewards() -> None:
    empty = torch.zeros(2, 0)
    for placement in ("last_valid", "every_valid"):
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


def test_p2_the_score_counts_once_however_long_the_response() -> None:
    """ColossalChat puts it on every token, which multiplies it by the length."""
    mask = lengths_mask([1, 3, 5], 5)
    assert token_rewards(torch.ones(3), torch.zeros(3, 5), mask).sum(-1).tolist() == [1, 1, 1]


def test_p17_the_penalty_is_subtracted() -> None:
    """The text of a published walk-through adds it; its numbers, and every system, subtract it."""
    kl = torch.tensor([[-0.3315, -0.0426, 0.6351]])
    mask = torch.ones(1, 3).bool()
    rewards = token_rewards(torch.tensor([0.4]), kl_penalties(kl, mask, kl_coef=0.15), mask)
    assert rewards[0].tolist() == pytest.approx([0.049725, 0.00639, 0.304735], abs=1e-6)
    assert not kl_penalties(kl, mask, kl_coef=-0.15).any()


def test_p20_scores_are_clipped_before_the_group_baseline() -> None:
    """OpenRLHF clips after subtracting the group's mean: an outlier still moves all others."""
    scores = clip_scores(torch.tensor([100.0, 1.0, 0.0, -1.0]), -1.0, 1.0)
    yes = torch.ones(4).bool()
    samples = Samples(scores=scores, groups=torch.zeros(4).long(), lengths=yes.long(), finished=yes, scored=yes)
    assert dr_grpo(samples).tolist() == pytest.approx([0.75, 0.75, -0.25, -1.25])


def test_p22_tool_tokens_have_no_penalty_and_no_reward() -> None:
    mask = torch.tensor([[True, True, False, False, True]])
    old, ref = torch.zeros(1, 5), torch.tensor([[-1.0, 2.0, -50.0, NAN, -3.0]])
    penalties = kl_penalties(k1(old, ref), mask, kl_coef=0.5)
    assert penalties.tolist() == [[-0.5, 1.0, 0.0, 0.0, -1.5]]
    for advantages in (
        broadcast_advantages(torch.tensor([1.0]), penalties, mask),
        gae(token_rewards(torch.tensor([1.0]), penalties, mask), torch.zeros(1, 5), mask, lam=1.0)[0],
    ):
        assert advantages.tolist() == [[0.0, 0.5, 0.0, 0.0, -0.5]]


def test_p30_a_fully_masked_row_has_no_last_token() -> None:
    """OpenRLHF finds the last token by an argmax over the reversed mask, which is the last column there."""
    nothing = torch.zeros(1, 4)
    for placement in ("last_valid", "every_valid"):
        assert not token_rewards(torch.tensor([9.0]), nothing, nothing.bool(), placement=placement).any()
