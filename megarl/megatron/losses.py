"""The losses of the actor and the critic in PPO on a micro-batch: from hidden states to weighted sums.

Each is a function of a step's schedule, whose totals are the denominators in the weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megarl.algos.aggregation import token_mean, weighted_sum
from megarl.algos.registry import AGGREGATIONS, KL_ESTIMATORS, POLICY_LOSSES, choose
from megarl.algos.terms import LossTerms, with_term
from megarl.algos.values import mse
from megarl.config.schema import Algo
from megarl.data.alignment import align, response_mask
from megarl.data.packing import Chunks, gather
from megarl.megatron.heads import response_logprobs, response_values
from megarl.megatron.measures import Measures, measured
from megarl.megatron.pipeline import MicroBatch
from megarl.megatron.role import Loss, Role, StepLoss
from megarl.types import ExperienceChunk, Ragged, RankSchedule


class Column:
    """One column of the experience, by chunk."""

    def __init__(self, experience: Chunks[ExperienceChunk], name: str) -> None:
        self._experience, self._name = experience, name

    def __getitem__(self, chunk: int) -> Ragged:
        return getattr(self._experience[chunk], self._name)


def policy_loss(
    role: Role, algo: Algo, experience: Chunks[ExperienceChunk], *, temperature: float, kl_coef: float
) -> StepLoss:
    """The actor's loss in PPO.

    Args:
        temperature: of the rollouts.
        kl_coef: of the step, loss per nat, where the penalty is in the loss.
    """
    loss_function = choose(POLICY_LOSSES, algo.policy_loss, "algo.policy_loss")
    estimate = choose(KL_ESTIMATORS, algo.kl.estimator, "algo.kl.estimator")

    def of_tokens(batch: MicroBatch, hidden: Tensor, mask: Tensor) -> LossTerms:
        flat, entropy = response_logprobs(
            role.model, batch, hidden, vocab_size=role.vocab_size, temperature=temperature
        )
        new, column = align(flat, mask), _columns(batch, experience, mask)
        loss = loss_function(new, column("old_logprobs"), column("advantages"), mask, clip=algo.clip)
        if algo.kl.placement == "loss" and algo.kl.coef > 0:
            loss = with_term(loss, "kl", estimate(new, column("ref_logprobs")), coef=kl_coef)
        return with_term(loss, "entropy", align(entropy, mask), coef=-algo.entropy_coef)

    return _aggregated(algo, of_tokens)


def value_loss(role: Role, algo: Algo, experience: Chunks[ExperienceChunk]) -> StepLoss:
    """The critic's loss in PPO."""

    def of_tokens(batch: MicroBatch, hidden: Tensor, mask: Tensor) -> LossTerms:
        values = align(response_values(role.model, batch, hidden), mask)
        column = _columns(batch, experience, mask)
        return mse(values, column("old_values"), column("returns"), clip=algo.value_clip)

    return _aggregated(algo, of_tokens)


def _columns(batch: MicroBatch, experience: Chunks[ExperienceChunk], mask: Tensor) -> Callable[[str], Tensor]:
    def column(name: str) -> Tensor:
        flat = gather(batch.rows, Column(experience, name))
        return align(torch.from_numpy(flat).to(mask.device), mask)

    return column


def _aggregated(algo: Algo, of_tokens: Callable[[MicroBatch, Tensor, Tensor], LossTerms]) -> StepLoss:
    """Weights that hold the step's denominators; metrics are means over the response tokens of the step."""
    aggregate = choose(AGGREGATIONS, algo.aggregation, "algo.aggregation")

    def of_step(schedule: RankSchedule) -> Loss:
        tokens_in_step, rows_in_step = schedule.total_response_tokens, schedule.total_sequences

        def loss(batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Measures]:
            assert batch.batch is not None
            mask = response_mask(batch.batch.response_lengths.tolist(), device=hidden.device)
            tokens = of_tokens(batch, hidden, mask)
            mean = token_mean(mask, total_tokens=tokens_in_step, total_sequences=rows_in_step)
            weights = aggregate(mask, total_tokens=tokens_in_step, total_sequences=rows_in_step)
            return weighted_sum(tokens.values, weights), measured(tokens, mask, mean)

        return loss

    return of_step
