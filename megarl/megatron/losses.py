"""The losses of a micro-batch: from hidden states to weighted sums with the denominators of an optimizer step.

A loss is made for one optimizer step, from its schedule, and called with each micro-batch and its hidden states.

Shape legend: B rows of the micro-batch, R response tokens of the longest of them, U preferences, N responses of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megarl.algos.aggregation import token_mean, weighted_sum
from megarl.algos.metrics import explained_variance
from megarl.algos.normalization import on_mask
from megarl.algos.policy_loss import MAX_LOG_RATIO, LossTerms, weighted, with_term
from megarl.algos.preference_loss import best_of_n, pairwise, span, spans_of
from megarl.algos.registry import (
    AGGREGATIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    PREFERENCE_LOSSES,
    ROLLOUT_WEIGHTS,
    VALUE_LOSSES,
    bound,
)
from megarl.algos.rollout_correction import off_policy_sequences, proximal_logprobs
from megarl.config.schema import Algo, Choice
from megarl.data.packing import Chunks, TokenChunk, gather
from megarl.experience.padded_batch import align, response_mask
from megarl.megatron.heads import (
    response_divergence,
    response_logprobs,
    response_states,
    response_values,
    row_scores,
    token_scores,
)
from megarl.megatron.loss_metrics import LossMetrics, collect
from megarl.megatron.model_engine import MakeLoss, ModelEngine
from megarl.megatron.pipeline import MicroBatch, micro_batches, run_forward
from megarl.role_specs import LossSpec, PolicySpec, PreferenceSpec, TextSpec, ValueSpec
from megarl.types import ExperienceChunk, PackRow, RankSchedule, TextChunk


class ExperienceColumns:
    """The columns of a micro-batch's experience, [B, R] each, 0 off the mask.

    Args:
        device: of the tensors.
    """

    def __init__(self, batch: MicroBatch, experience: Chunks[ExperienceChunk], device: torch.device) -> None:
        assert batch.batch is not None
        self._rows = batch.rows
        self._chunks = {row.chunk: experience[row.chunk] for row in batch.rows}
        self.mask = response_mask(batch.batch.response_lengths.tolist(), device=device)

    def __call__(self, name: str) -> Tensor:
        flat = gather(self._rows, {index: getattr(chunk, name) for index, chunk in self._chunks.items()})
        return align(torch.from_numpy(flat).to(self.mask.device), self.mask)

    def optional(self, name: str) -> Tensor | None:
        """The column; None where the experience has none, or the micro-batch no rows."""
        present = any(getattr(chunk, name) is not None for chunk in self._chunks.values())
        return self(name) if present else None

    def mask_of(self, name: str) -> Tensor:
        """[B, R] bool: the response tokens that a mask's column selects; all of them without the column."""
        column = self.optional(name)
        return self.mask if column is None else column > 0


class _Aggregation:
    """Sums terms per token with weights that hold the step's denominators, which are of all response tokens."""

    def __init__(self, algo: Algo, schedule: RankSchedule) -> None:
        self._weights = bound(AGGREGATIONS, algo.aggregation.name, algo.aggregation.options)
        self._totals = {
            "total_tokens": schedule.total_response_tokens,
            "total_sequences": schedule.total_sequences,
        }

    def __call__(
        self, terms: LossTerms, parts: Mapping[str, Tensor], mask: Tensor, *, learned: Tensor, reported: Tensor
    ) -> tuple[Tensor, LossMetrics]:
        """The loss and its metrics.

        Args:
            parts: [B, R] by name, aggregated as the loss is and reported as ``NAME_loss``.
            learned: [B, R] bool, the tokens in the loss.
            reported: [B, R] bool, the tokens over which metrics are means.
        """
        weights = on_mask(self._weights(mask, **self._totals), learned)
        metrics = collect(terms, reported, token_mean(mask, **self._totals, dtype=torch.float64))
        sums = {f"{name}_loss": weighted_sum(part.detach(), weights) for name, part in parts.items()}
        return weighted_sum(terms.values, weights), replace(metrics, sums={**metrics.sums, **sums})


class PolicyLoss:
    """The actor's loss: policy loss + kl_coef * KL - entropy_coef * entropy, each aggregated alike.

    Args:
        temperature: of the rollouts.
        kl_coef: of the step, loss per nat, where the penalty is in the loss.
        share: factor of the whole, beside other losses of the step.
        reference: of the engine's layout; needed where the penalty is of whole distributions.
    """

    def __init__(
        self,
        engine: ModelEngine,
        algo: Algo,
        experience: Chunks[ExperienceChunk],
        schedule: RankSchedule,
        *,
        temperature: float,
        kl_coef: float,
        share: float = 1.0,
        reference: ModelEngine | None = None,
    ) -> None:
        self._engine, self._algo, self._experience = engine, algo, experience
        self._temperature, self._kl_coef, self._share = temperature, kl_coef, share
        self._per_token = bound(POLICY_LOSSES, algo.policy_loss.name, algo.policy_loss.options)
        self._aggregate = _Aggregation(algo, schedule)
        self._divergence: ReferenceDivergence | None = None
        if algo.kl.of_distributions:
            assert reference is not None, "the penalty is of the reference's distributions"
            self._divergence = ReferenceDivergence(engine, reference, experience, schedule, temperature=temperature)

    def __call__(self, batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, LossMetrics]:
        columns = ExperienceColumns(batch, self._experience, hidden.device)
        mask = columns.mask
        flat, entropy = response_logprobs(
            self._engine.model, batch, hidden, vocab_size=self._engine.vocab_size, temperature=self._temperature
        )
        new = align(flat, mask)
        old = self._old_logprobs(new, columns)
        terms = self._per_token(new, old, columns("advantages"), mask)
        terms = weighted(_with_metrics(terms, ppo_kl=old - new), self._weights(new, old, columns))
        parts = {"policy": terms.values}
        if self._algo.kl.placement == "loss" and self._algo.kl.coef > 0:
            if self._divergence is None:
                parts["kl"] = self._kl(new, old, columns("ref_logprobs"))
            else:
                parts["kl"] = align(self._divergence(batch, hidden), mask)
            terms = with_term(terms, "kl", parts["kl"], coef=self._kl_coef)
        terms = with_term(terms, "entropy", align(entropy, mask), coef=-self._algo.entropy_coef)
        loss, metrics = self._aggregate(terms, parts, mask, learned=columns.mask_of("actor_mask"), reported=mask)
        return self._share * loss, metrics

    def _old_logprobs(self, new: Tensor, columns: ExperienceColumns) -> Tensor:
        """Of the policy in the ratio's denominator, perhaps between the engines' and the one in training."""
        old, method = columns("old_logprobs"), self._algo.correction.old_logprobs
        if method in ("loglinear", "linear"):
            return proximal_logprobs(old, new, columns("proximal_weights"), method=method)
        return old

    def _weights(self, new: Tensor, old: Tensor, columns: ExperienceColumns) -> Tensor:
        """Factors of the policy loss: those of the experience, and those that depend on the policy in training."""
        correction, given, mask = self._algo.correction, columns.optional("weights"), columns.mask
        weights = mask.to(new.dtype) if given is None else given
        if correction.weights is not None and correction.interpolates:
            weigh = bound(ROLLOUT_WEIGHTS, correction.weights.name, correction.weights.options)
            weights = weights * weigh(old, columns("rollout_logprobs"), mask, _without_reduction)
        if correction.sequence_mask is not None:
            delta, sampled = correction.sequence_mask.delta, columns("rollout_logprobs")
            weights = weights * off_policy_sequences(new, sampled, columns("advantages"), mask, delta=delta)
        return weights

    def _kl(self, new: Tensor, old: Tensor, ref: Tensor) -> Tensor:
        """[B, R] nats, the estimate of the penalty."""
        kl = self._algo.kl
        estimate = bound(KL_ESTIMATORS, kl.estimator.name, kl.estimator.options)
        if not kl.importance:
            return estimate(new, ref)
        ratio = (new - old).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        return estimate(new, ref, ratio)


def _without_reduction(vector: Tensor) -> Tensor:
    """Of weights that a micro-batch computes by itself."""
    return vector


class ReferenceDivergence:
    """KL(policy || reference) at each response token of an optimizer step.

    The reference runs the step's micro-batches at once and keeps, on its last stage, a hidden state per token; the
    logits of both models then exist for some tokens at a time. Collective over the engine's ranks.

    Args:
        reference: in the same processes, of the same layout.
        temperature: of the distributions.
    """

    def __init__(
        self,
        engine: ModelEngine,
        reference: ModelEngine,
        chunks: Chunks[TokenChunk],
        schedule: RankSchedule,
        *,
        temperature: float,
    ) -> None:
        assert engine.layout == reference.layout, "the ranks have other parts of the vocabulary"
        self._engine, self._reference, self._temperature = engine, reference, temperature
        batches = micro_batches(reference.model, schedule, chunks)
        states = run_forward(reference.model, batches, schedule.pack_tokens, partial(response_states, reference.model))
        # Stages before the last have no states.
        self._states = {batch.rows: state for batch, state in zip(batches, states, strict=False)}

    def __call__(self, batch: MicroBatch, hidden: Tensor) -> Tensor:
        """[T] nats, with the gradient of the engine's hidden states and output layer."""
        return response_divergence(
            self._engine.model,
            batch,
            hidden,
            self._reference.model,
            self._states[batch.rows],
            vocab_size=self._engine.vocab_size,
            temperature=self._temperature,
        )


class ValueLoss:
    """The critic's loss."""

    def __init__(
        self, engine: ModelEngine, algo: Algo, experience: Chunks[ExperienceChunk], schedule: RankSchedule
    ) -> None:
        self._engine, self._experience = engine, experience
        self._per_token = bound(VALUE_LOSSES, algo.value_loss.name, algo.value_loss.options)
        self._aggregate = _Aggregation(algo, schedule)

    def __call__(self, batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, LossMetrics]:
        columns = ExperienceColumns(batch, self._experience, hidden.device)
        values = align(response_values(self._engine.model, batch, hidden), columns.mask)
        returns = columns("returns")
        terms = self._per_token(values, columns("old_values"), returns)
        terms = _with_metrics(terms, error=(values - returns).square())
        terms = replace(terms, spreads={**terms.spreads, "returns": returns})
        selected = columns.mask_of("critic_mask")
        return self._aggregate(terms, {}, columns.mask, learned=selected, reported=selected)


def _with_metrics(terms: LossTerms, **metrics: Tensor) -> LossTerms:
    """Adds metrics that the run needs, for a user's own loss that lacks them."""
    return replace(terms, metrics={**{name: values.detach() for name, values in metrics.items()}, **terms.metrics})


class TextLoss:
    """The mean negative log-likelihood per response token of the step, nats.

    Args:
        mix_share: factor of texts beside a policy loss, whose only metric is ``ptx_loss``; None without.
    """

    def __init__(self, engine: ModelEngine, schedule: RankSchedule, *, mix_share: float | None = None) -> None:
        self._engine, self._mix_share = engine, mix_share
        self._weight = 1 / max(schedule.total_response_tokens, 1)

    def __call__(self, batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, LossMetrics]:
        logprobs, entropy = response_logprobs(
            self._engine.model, batch, hidden, vocab_size=self._engine.vocab_size, temperature=1.0
        )
        loss = -logprobs.sum() * self._weight
        if self._mix_share is not None:
            return self._mix_share * loss, LossMetrics(sums={"ptx_loss": loss.detach()})
        return loss, LossMetrics(sums={"entropy": entropy.detach().sum() * self._weight})


class PreferenceLoss:
    """The reward model's loss: the mean over the preferences of the step; see ``algos.preference_loss``.

    The responses of a preference are neighbours in a pack, the best one first. The spread ``score`` is of all of them.

    Args:
        chunks: with margins, where the loss reads them.
    """

    def __init__(
        self, engine: ModelEngine, settings: Choice, chunks: Chunks[TextChunk], schedule: RankSchedule
    ) -> None:
        self._engine, self._settings, self._chunks = engine, settings, chunks
        self._responses, self._rows = schedule.rows_per_unit, max(schedule.total_rows, 1)

    def __call__(self, batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, LossMetrics]:
        responses = self._responses
        assert _are_units(batch.rows, responses), "a pack holds whole preferences, the best response first"
        scores = row_scores(self._engine.model, batch, hidden)
        terms = self._per_preference(batch, hidden, scores.view(-1, responses))
        detached = scores.detach()
        spread = LossTerms(values=detached, metrics={}, spreads={"score": detached})
        metrics, of_scores = _mean(terms, responses / self._rows), _mean(spread, 1 / self._rows)
        loss = terms.values.sum() * (responses / self._rows)
        return loss, replace(of_scores, means={**metrics.means, **of_scores.means})

    def _per_preference(self, batch: MicroBatch, hidden: Tensor, scores: Tensor) -> LossTerms:
        """Terms [U] of scores [U, N]."""
        match (settings := self._settings).name:
            case "pairwise":
                margins = self._margins(batch, scores) if settings.options["margin"] else None
                chosen, rejected = scores.unbind(-1)
                return pairwise(chosen, rejected, margins, **settings.options)
            case "best_of_n":
                # The best one last: where another has the same score, it does not count as found.
                best = torch.full((len(scores),), scores.shape[1] - 1, device=scores.device)
                return best_of_n(scores.flip(-1), best)
            case "span":
                return self._span(batch, hidden) if batch.rows else pairwise(*scores.unbind(-1))
            case _:
                return bound(PREFERENCE_LOSSES, settings.name, settings.options)(*scores.unbind(-1))

    def _margins(self, batch: MicroBatch, scores: Tensor) -> Tensor:
        """[U]."""
        margins: list[float] = []
        for row in batch.rows[0::2]:
            column = self._chunks[row.chunk].margins
            assert column is not None, "the rows were read without their margins"
            margins.append(float(column[row.row]))
        return torch.tensor(margins, dtype=scores.dtype, device=scores.device)

    def _span(self, batch: MicroBatch, hidden: Tensor) -> LossTerms:
        """A response that has ended keeps the score of its last token, where the other one goes on."""
        assert batch.batch is not None
        mask = response_mask(batch.batch.response_lengths.tolist(), device=hidden.device)
        scores = align(token_scores(self._engine.model, batch, hidden), mask)
        last = scores.gather(-1, mask.sum(-1, keepdim=True) - 1)
        held = torch.where(mask, scores, last)
        no_token = -1
        ids = torch.full_like(mask, no_token, dtype=torch.int64)
        ids[mask] = torch.from_numpy(batch.batch.labels).to(mask.device)
        return span(held[0::2], held[1::2], spans_of(ids[0::2], ids[1::2], pad=no_token))


def _mean(terms: LossTerms, weight: float) -> LossMetrics:
    everything = torch.ones_like(terms.values, dtype=torch.bool)
    return collect(terms, everything, torch.full_like(terms.values, weight, dtype=torch.float64))


def _are_units(rows: Sequence[PackRow], size: int) -> bool:
    """Whether the rows are whole preferences of so many responses, one after the other."""
    firsts = rows[0::size]
    return len(rows) % size == 0 and all(
        row.chunk == first.chunk and first.row % size == 0 and row.row == first.row + place
        for index, first in enumerate(firsts)
        for place, row in enumerate(rows[index * size : (index + 1) * size])
    )


def loss_maker(
    spec: LossSpec,
    engine: ModelEngine,
    chunks: Chunks[Any],
    *,
    kl_coef: float = 0.0,
    reference: ModelEngine | None = None,
) -> MakeLoss:
    """What makes the loss of an optimizer step from its schedule.

    Args:
        chunks: with the columns that the loss reads.
        kl_coef, reference: see ``PolicyLoss``.
    """
    match spec:
        case PolicySpec(algo=algo, temperature=temperature, share=share):
            options = {"temperature": temperature, "kl_coef": kl_coef, "share": share, "reference": reference}
            return partial(PolicyLoss, engine, algo, chunks, **options)
        case ValueSpec(algo=algo):
            return partial(ValueLoss, engine, algo, chunks)
        case PreferenceSpec(loss=settings):
            return partial(PreferenceLoss, engine, settings, chunks)
        case TextSpec():
            return partial(TextLoss, engine)


_POLICY_NAMES = {"loss": "loss/total", "policy_loss": "policy/loss", "kl_loss": "loss/kl", "ptx_loss": "loss/ptx"}


def report(spec: LossSpec, step: Mapping[str, float]) -> dict[str, float]:
    """The metrics of an optimizer step under their public names."""
    match spec:
        case PolicySpec():
            return {_POLICY_NAMES.get(name, f"policy/{name}"): value for name, value in step.items()}
        case ValueSpec():
            values = {f"value/{name}": value for name, value in step.items()}
            if "error" in step:  # else no response of the mini-batch has a score
                after = explained_variance(step["error"], step["returns_var"])
                values["value/explained_variance_after"] = after
            return values
        case TextSpec(stage=stage) | PreferenceSpec(stage=stage):
            return {f"{stage}/{name}": value for name, value in step.items()}
