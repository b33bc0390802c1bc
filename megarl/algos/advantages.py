"""Advantages of response tokens, from their rewards or from an advantage per sample.

An estimator is a function of (rewards, values, response_mask), with options by keyword:

Args:
    rewards: [B, R], the penalty of each token, plus the score of the response where it is placed.
    values: [B, R], of the state before each token; None without a critic.
    response_mask: [B, R] bool; in a run False on responses without a score.
    gamma: discount per token.

Returns:
    advantages, and returns (the critic's targets), [B, R] each, 0 off the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algos.normalization import on_mask
from megarl.bounds import Fraction, Positive


def gae(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    bootstrap: Tensor | None = None,
    *,
    gamma: Fraction = 1.0,
    lam: Fraction = 0.95,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation with a critic, over the counting tokens of each row.

        delta[t] = r[t] + gamma * V[t'] - V[t];  A[t] = delta[t] + gamma * lam * A[t'];  returns[t] = A[t] + V[t]

    t' is the next counting token of the row; V and A are 0 after the last. Tokens that do not count
    (of a tool, say) are skipped, without a discount. Source: Schulman et al., "High-dimensional
    continuous control using generalized advantage estimation" (2016); skipped tokens
    as in verl and AReaL.

    Args:
        bootstrap: [B], value of the state after the last token, for truncated rows; None is 0.
        lam: decay per token; 1 is Monte Carlo, 0 one-step.
    """
    advantages, returns = scan(rewards, values, response_mask, bootstrap, gamma=gamma, lam=lam)
    return on_mask(advantages, response_mask), on_mask(returns, response_mask)


def vapo(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: Fraction = 1.0,
    lam_value: Fraction = 1.0,
    lam_policy: Fraction | None = None,
    length_alpha: Positive = 0.05,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation with separate decays for the critic's returns and the advantages.

        returns = A(lam_value) + V;  advantages = A(lam_policy), or A(1 - 1 / max(length_alpha * n, 1))

    A(lam) is that of ``gae``, n the counting tokens of the row. Source: VAPO (Yue et
    al., 2025); NeMo-RL.

    Args:
        lam_value: decay per token of the critic's returns.
        lam_policy: decay per token of the advantages; None is 1 - 1 / (length_alpha *
            tokens of the response).
        length_alpha: growth of the advantages' decay with the response's length,
            where lam_policy is None.
    """
    by_length = 1 - 1 / (length_alpha * response_mask.sum(-1).to(values.dtype)).clamp(min=1)
    lam = by_length if lam_policy is None else lam_policy
    advantages, _ = scan(rewards, values, response_mask, gamma=gamma, lam=lam)
    _, returns = scan(rewards, values, response_mask, gamma=gamma, lam=lam_value)
    return on_mask(advantages, response_mask), on_mask(returns, response_mask)


def reinforce(
    rewards: Tensor, values: Tensor | None, response_mask: Tensor, *, gamma: Fraction = 1.0
) -> tuple[Tensor, Tensor]:
    """The discounted return of each token, without a critic: A[t] = G[t] = r[t] + gamma * G[t'].

    t' is the next counting token of the row; advantages and returns are the same.
    ``algo.normalise.advantages: auto`` whitens ``reinforce_pp`` (REINFORCE++) over the tokens of
    the step, with the penalties in the rewards. Source: Williams, "Simple statistical
    gradient-following algorithms" (1992); REINFORCE++ (Hu et al., 2025); OpenRLHF and verl.
    """
    returns = on_mask(discounted_returns(rewards, response_mask, gamma=gamma), response_mask)
    return returns, returns


def broadcast_advantages(
    sequence_advantages: Tensor, penalties: Tensor, response_mask: Tensor, *, cumulative: bool = True
) -> Tensor:
    """The advantage a of a sample on each of its tokens, plus the penalties, [B, R], 0 off the mask.

        A[t] = a + sum over t' >= t of penalty[t'], or if not cumulative: A[t] = a + penalty[t]

    Source: OpenRLHF (cumulative); slime and NeMo-RL (each token's own).

    Args:
        sequence_advantages: [B].
        penalties: [B, R], of ``reward_shaping.kl_penalties``.
    """
    added = discounted_returns(penalties, response_mask) if cumulative else penalties
    return on_mask(sequence_advantages[:, None] + added, response_mask)


def discounted_returns(rewards: Tensor, response_mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """G[t] = r[t] + gamma * G[t'], [B, R], not masked."""
    return scan(rewards, torch.zeros_like(rewards), response_mask, gamma=gamma, lam=1.0)[0]


def scan(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    bootstrap: Tensor | None = None,
    *,
    gamma: float,
    lam: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """The recursion of ``gae``, from the last column to the first, and its returns; not masked.

    Args:
        lam: decay per token; a tensor has one per row, [B].
    """
    advantages = torch.zeros_like(values)
    carried = values.new_zeros(len(values))
    next_value = carried if bootstrap is None else bootstrap
    for t in reversed(range(values.shape[1])):
        counts = response_mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        carried = torch.where(counts, delta + gamma * lam * carried, carried)
        next_value = torch.where(counts, values[:, t], next_value)
        advantages[:, t] = carried
    return advantages, advantages + values
