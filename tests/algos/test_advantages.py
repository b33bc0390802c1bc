"""Token advantages: against naive sums, and invariances."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algos.advantages import broadcast_advantages, gae, reinforce, vapo
from tests.algos.inputs import NAN, fractions, lengths, lengths_mask, masks, numbers, seeds
from tests.oracle import advantages as naive
from tests.oracle.comparisons import reward_to_go_of


@given(lengths, fractions, fractions, seeds)
def test_gae_equals_its_definition(lengths: list[int], gamma: float, lam: float, seed: int) -> None:
    rewards, values = numbers(len(lengths), 6, seed=seed), numbers(len(lengths), 6, seed=seed + 1)
    mask = lengths_mask(lengths, 6)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    for i, n in enumerate(lengths):
        expected, sums = naive.gae(rewards[i, :n].tolist(), values[i, :n].tolist(), gamma=gamma, lam=lam)
        assert advantages[i, :n].tolist() == pytest.approx(expected, abs=1e-10)
        assert returns[i, :n].tolist() == pytest.approx(sums, abs=1e-10)
    assert not advantages[~mask].any()
    assert not returns[~mask].any()


@given(lengths, fractions, st.floats(0.01, 1), seeds)
def test_vapo_decays_returns_and_advantages_separately(lengths: list[int], lam: float, alpha: float, seed: int) -> None:
    rewards, values = numbers(len(lengths), 6, seed=seed), numbers(len(lengths), 6, seed=seed + 1)
    mask = lengths_mask(lengths, 6)
    advantages, returns = vapo(rewards, values, mask, gamma=0.9, lam_value=lam, length_alpha=alpha)
    fixed, _ = vapo(rewards, values, mask, gamma=0.9, lam_value=lam, lam_policy=0.7)
    for i, n in enumerate(lengths):
        row = rewards[i, :n].tolist(), values[i, :n].tolist()
        expected, sums = naive.vapo(*row, gamma=0.9, lam_value=lam, length_alpha=alpha)
        assert advantages[i, :n].tolist() == pytest.approx(expected, abs=1e-10)
        assert returns[i, :n].tolist() == pytest.approx(sums, abs=1e-10)
        assert fixed[i, :n].tolist() == pytest.approx(naive.gae(*row, gamma=0.9, lam=0.7)[0], abs=1e-10)
    assert not advantages[~mask].any()
    assert not returns[~mask].any()


@given(masks, fractions, seeds)
def test_reinforce_is_the_reward_to_go_over_unmasked_tokens(rows: list[list[bool]], gamma: float, seed: int) -> None:
    mask = torch.tensor(rows)
    rewards = numbers(*mask.shape, seed=seed)
    advantages, returns = reinforce(torch.where(mask, rewards, NAN), None, mask, gamma=gamma)
    for i, row in enumerate(mask):
        expected, _ = naive.reward_to_go(rewards[i, row].tolist(), gamma=gamma)
        assert advantages[i, row].tolist() == pytest.approx(expected, abs=1e-10)
    assert torch.equal(advantages, returns)
    assert not advantages[~mask].any()


@given(masks, st.booleans(), seeds)
def test_sequence_advantages_are_broadcast_to_unmasked_tokens_with_penalties(
    rows: list[list[bool]], cumulative: bool, seed: int
) -> None:
    mask = torch.tensor(rows)
    outcomes, penalties = numbers(len(rows), seed=seed), numbers(*mask.shape, seed=seed + 1)
    advantages = broadcast_advantages(outcomes, torch.where(mask, penalties, NAN), mask, cumulative=cumulative)
    for i, row in enumerate(mask):
        expected = reward_to_go_of(outcomes[i].item(), penalties[i, row].tolist(), cumulative=cumulative)
        assert advantages[i, row].tolist() == pytest.approx(expected, abs=1e-10)
    assert not advantages[~mask].any()


@given(lengths, seeds)
def test_t5_t7_padding_and_masked_rows_change_nothing(lengths: list[int], seed: int) -> None:
    rewards, values = numbers(len(lengths), 6, seed=seed), numbers(len(lengths), 6, seed=seed + 1)
    mask, pad = lengths_mask(lengths, 6), torch.nn.functional.pad
    wide = [pad(x, (0, 3, 0, 1), value=NAN) for x in (rewards, values)]
    wide_mask = pad(mask, (0, 3, 0, 1), value=False)
    for estimate in (gae, vapo, reinforce):
        narrow, padded = estimate(rewards, values, mask, gamma=0.9), estimate(*wide, wide_mask, gamma=0.9)
        for one, other in zip(narrow, padded, strict=True):
            assert torch.equal(one, other[:-1, :-3])
            assert not other[-1].any()


# ---- pitfalls


def test_p8_only_truncated_rows_bootstrap_a_value() -> None:
    """AReaL treats every row that fills the batch's width as truncated, so also the longest finished one."""
    rewards, values, mask = torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3).bool()
    advantages, _ = gae(rewards, values, mask, torch.tensor([0.0, 2.0]), lam=1.0)
    assert advantages.tolist() == [[0, 0, 0], [2, 2, 2]]
