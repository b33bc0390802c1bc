"""The losses of actor and critic on a micro-batch: from hidden states to weighted sums.

Each is a function of a step's schedule, whose totals are the denominators in the weights. Shape legend: B rows of the
micro-batch, R response tokens of the longest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypedDict

import torch
from torch import Tensor

from megarl.algos.aggregation import token_mean, weighted_sum
from megarl.algos.normalization import on_mask
from megarl.algos.policy_loss import MAX_LOG_RATIO, LossTerms, weighted, with_term
from megarl.algos.registry import AGGREGATIONS, KL_ESTIMATORS, POLICY_LOSSES, ROLLOUT_WEIGHTS, VALUE_LOSSES, bound
from megarl.algos.rollout_correction import off_policy_sequences, proximal_logprobs
from megarl.config.schema import Algo
from megarl.data.packing import Chunks, TokenChunk, gather
from megarl.experience.padded_batch import align, response_mask
from megarl.megatron.heads import response_divergence, response_logprobs, response_states, response_values
from megarl.megatron.loss_metrics import Measures, measured
from megarl.megatron.model_engine import Loss, Role, StepLoss
from megarl.megatron.pipeline import MicroBatch, micro_batches, run_forward
from megarl.megatron.supervised_losses import sft_loss
from megarl.types import ExperienceChunk, PackRow, Ragged, RankSchedule


class ReferenceDivergence:
    """KL(policy || reference) at each response token of an optimizer step.

    Before the step the reference runs its micro-batches and keeps, on its last stage, a hidden state per token. The
    logits of both models then live a chunk of tokens at a time.

    Args:
        role: in training.
        reference: in the same processes, of the same layout.
        chunks: the samples.
        temperature: of the distributions.
    """

    def __init__(self, role: Role, reference: Role, chunks: Chunks[TokenChunk], *, temperature: float) -> None:
        assert role.layout == reference.layout, "the ranks have other parts of the vocabulary"
        self._role, self._reference, self._chunks = role, reference, chunks
        self._temperature = temperature
        self._states: dict[tuple[PackRow, ...], torch.Tensor] = {}

    def before(self, step_loss: StepLoss) -> StepLoss:
        """The same loss, before whose optimizer step the reference is run; collective over the role's ranks."""

        def of_step(schedule: RankSchedule) -> Loss:
            model = self._reference.model
            batches = micro_batches(model, schedule, self._chunks)

            def outcome(batch: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
                return response_states(model, batch, hidden)

            states = run_forward(model, batches, schedule.pack_tokens, outcome)
            # stages before the last have none
            self._states = {batch.rows: own for batch, own in zip(batches, states, strict=False)}
            return step_loss(schedule)

        return of_step

    def __call__(self, batch: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
        """[T] nats, with the gradient of the role's hidden states and output layer."""
        return response_divergence(
            self._role.model,
            batch,
            hidden,
            self._reference.model,
            self._states[batch.rows],
            vocab_size=self._role.vocab_size,
            temperature=self._temperature,
        )


class _Rows:
    """The experience of a micro-batch.

    Args:
        batch: the micro-batch.
        experience: by chunk.
        device: of the tensors.
    """

    def __init__(self, batch: MicroBatch, experience: Chunks[ExperienceChunk], device: torch.device) -> None:
        assert batch.batch is not None
        self._rows, self._experience = batch.rows, experience
        self.mask = response_mask(batch.batch.response_lengths.tolist(), device=device)

    def __call__(self, name: str) -> Tensor:
        """[B, R] of a column, 0 off the mask."""
        flat = gather(self._rows, _Column(self._experience, name))
        return align(torch.from_numpy(flat).to(self.mask.device), self.mask)

    def optional(self, name: str) -> Tensor | None:
        """The same; None where the experience has no such column, or the micro-batch no rows."""
        present = any(getattr(self._experience[row.chunk], name) is not None for row in self._rows)
        return self(name) if present else None

    def kept(self, name: str) -> Tensor:
        """[B, R] bool: the response tokens that a column keeps; all of them without such a column."""
        column = self.optional(name)
        return self.mask if column is None else column > 0


class _Column:
    """One column of the experience, by chunk."""

    def __init__(self, experience: Chunks[ExperienceChunk], name: str) -> None:
        self._experience, self._name = experience, name

    def __getitem__(self, chunk: int) -> Ragged:
        return getattr(self._experience[chunk], self._name)


@dataclass(frozen=True, kw_only=True)
class _Tokens:
    """A loss by token, and what else is told.

    Args:
        terms: [B, R].
        parts: [B, R] by name, aggregated as the loss is.
        kept: [B, R] bool, what the loss is made of. Denominators are those of all response tokens.
        told: [B, R] bool, what the metrics of the terms are means over.
    """

    terms: LossTerms
    parts: Mapping[str, Tensor]
    kept: Tensor
    told: Tensor


class _Totals(TypedDict):
    """The denominators of a step; see ``algos.aggregation``."""

    total_tokens: int
    total_sequences: int


def policy_loss(
    role: Role,
    algo: Algo,
    experience: Chunks[ExperienceChunk],
    *,
    temperature: float,
    kl_coef: float,
    share: float = 1.0,
    reference: Role | None = None,
) -> StepLoss:
    """The actor's loss: policy loss + kl_coef * KL - entropy_coef * entropy, each aggregated alike.

    Args:
        temperature: of the rollouts.
        kl_coef: of the step, loss per nat, where the penalty is in the loss.
        share: what the whole is multiplied by, beside other losses of the step.
        reference: of the role's layout; needed where the penalty is of the whole distribution.
    """
    loss_function = bound(POLICY_LOSSES, algo.policy_loss.name, algo.policy_loss.options)
    divergence = None
    if algo.kl.of_distributions:
        assert reference is not None, "the penalty is of the reference's distributions"
        divergence = ReferenceDivergence(role, reference, experience, temperature=temperature)

    def of_tokens(batch: MicroBatch, hidden: Tensor, rows: _Rows) -> _Tokens:
        flat, entropy = response_logprobs(
            role.model, batch, hidden, vocab_size=role.vocab_size, temperature=temperature
        )
        new = align(flat, rows.mask)
        old = _old_logprobs(algo, new, rows)
        terms = loss_function(new, old, rows("advantages"), rows.mask)
        terms = weighted(_telling(terms, ppo_kl=old - new), _weights(algo, new, old, rows))
        parts = {"policy": terms.values}
        if algo.kl.placement == "loss" and algo.kl.coef > 0:
            parts["kl"] = (
                _kl(algo, new, old, rows("ref_logprobs"))
                if divergence is None
                else align(divergence(batch, hidden), rows.mask)
            )
            terms = with_term(terms, "kl", parts["kl"], coef=kl_coef)
        terms = with_term(terms, "entropy", align(entropy, rows.mask), coef=-algo.entropy_coef)
        return _Tokens(terms=terms, parts=parts, kept=rows.kept("kept"), told=rows.mask)

    step_loss = _aggregated(algo, experience, of_tokens, share)
    return step_loss if divergence is None else divergence.before(step_loss)


def value_loss(role: Role, algo: Algo, experience: Chunks[ExperienceChunk]) -> StepLoss:
    """The critic's loss."""
    loss_function = bound(VALUE_LOSSES, algo.value_loss.name, algo.value_loss.options)

    def of_tokens(batch: MicroBatch, hidden: Tensor, rows: _Rows) -> _Tokens:
        values, returns = align(response_values(role.model, batch, hidden), rows.mask), rows("returns")
        terms = loss_function(values, rows("old_values"), returns)
        terms = _telling(terms, error=(values - returns).square())
        terms = replace(terms, spreads={**terms.spreads, "returns": returns})
        kept = rows.kept("value_kept")
        return _Tokens(terms=terms, parts={}, kept=kept, told=kept)

    return _aggregated(algo, experience, of_tokens, 1.0)


def text_loss(role: Role, *, share: float) -> StepLoss:
    """The mean negative log-likelihood per token of the texts that a step takes along, nats.

    Args:
        share: what it is multiplied by, beside the step's own loss.
    """
    likelihood = sft_loss(role)

    def of_step(schedule: RankSchedule) -> Loss:
        loss = likelihood(schedule)

        def shared(batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Measures]:
            value, _ = loss(batch, hidden)
            return share * value, Measures(sums={"ptx_loss": value.detach()})

        return shared

    return of_step


def _old_logprobs(algo: Algo, new: Tensor, rows: _Rows) -> Tensor:
    """Of the policy that the ratio is to; on the way from the engines' to the one in training where that is chosen."""
    old, method = rows("old_logprobs"), algo.correction.old_logprobs
    if method in ("loglinear", "linear"):
        return proximal_logprobs(old, new, rows("proximal_weights"), method=method)
    return old


def _telling(terms: LossTerms, **metrics: Tensor) -> LossTerms:
    """The same terms, which tell what the run looks at even where a user's own loss does not."""
    return replace(terms, metrics={**{name: values.detach() for name, values in metrics.items()}, **terms.metrics})


def _weights(algo: Algo, new: Tensor, old: Tensor, rows: _Rows) -> Tensor:
    """What the policy loss is multiplied by: what the experience says, and what the policy in training decides."""
    correction, given = algo.correction, rows.optional("weights")
    weights = rows.mask.to(new.dtype) if given is None else given
    if correction.weights is not None and correction.old_logprobs in ("loglinear", "linear"):
        weigh = bound(ROLLOUT_WEIGHTS, correction.weights.name, correction.weights.options)
        weights = weights * weigh(old, rows("rollout_logprobs"), rows.mask, _alone)
    if correction.sequence_mask is not None:
        delta, sampled = correction.sequence_mask.delta, rows("rollout_logprobs")
        weights = weights * off_policy_sequences(new, sampled, rows("advantages"), rows.mask, delta=delta)
    return weights


def _alone(vector: Tensor) -> Tensor:
    """No reduction: weights of a micro-batch know nothing of the rest of the step."""
    return vector


def _kl(algo: Algo, new: Tensor, old: Tensor, ref: Tensor) -> Tensor:
    """The penalty's estimate per token, nats."""
    estimate = bound(KL_ESTIMATORS, algo.kl.estimator.name, algo.kl.estimator.options)
    if not algo.kl.importance:
        return estimate(new, ref)
    ratio = (new - old).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return estimate(new, ref, ratio)


def _aggregated(
    algo: Algo,
    experience: Chunks[ExperienceChunk],
    of_tokens: Callable[[MicroBatch, Tensor, _Rows], _Tokens],
    share: float,
) -> StepLoss:
    """Weights that hold the step's denominators, which are of all response tokens, left out or not."""
    aggregate = bound(AGGREGATIONS, algo.aggregation.name, algo.aggregation.options)

    def of_step(schedule: RankSchedule) -> Loss:
        totals = _Totals(total_tokens=schedule.total_response_tokens, total_sequences=schedule.total_sequences)

        def loss(batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Measures]:
            rows = _Rows(batch, experience, hidden.device)
            tokens = of_tokens(batch, hidden, rows)
            weights = on_mask(aggregate(rows.mask, **totals), tokens.kept)
            told = measured(tokens.terms, tokens.told, token_mean(rows.mask, **totals, dtype=torch.float64))
            parts = {f"{name}_loss": weighted_sum(part.detach(), weights) for name, part in tokens.parts.items()}
            return share * weighted_sum(tokens.terms.values, weights), replace(told, sums={**told.sums, **parts})

        return loss

    return of_step
