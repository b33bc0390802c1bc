"""The losses of a micro-batch: from hidden states to weighted sums with the denominators of an optimizer step.

A loss object is made for one optimizer step from its schedule, and called with each micro-batch and its hidden states.

Shape legend: B rows of the micro-batch, R response tokens of the longest of them, U preferences, N responses of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from megarl.algos.aggregation import token_mean, weighted_sum
from megarl.algos.kl import k1
from megarl.algos.metrics import Means, explained_variance, gaps_by_age, mismatch, policy_drift
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
from megarl.config.schema.loss_specs import LossSpec, PolicySpec, PreferenceSpec, TextSpec, ValueSpec
from megarl.data.packing import Chunks, TokenChunk, gather
from megarl.experience.padded_batch import align, response_mask
from megarl.experience.records import ExperienceChunk
from megarl.megatron.heads import response_logprobs, response_states, response_values, row_scores, token_scores
from megarl.megatron.logprobs import divergence, vocab_shard
from megarl.megatron.loss_metrics import LossMetrics, collect
from megarl.megatron.model_engine import MakeLoss, ModelEngine
from megarl.megatron.pipeline import MicroBatch, micro_batches, run_forward
from megarl.types import PackRow, RankSchedule, TextChunk, TokenValues


class ExperienceColumns:
    """The columns of a micro-batch's experience on a device, [B, R] each, 0 off the mask."""

    def __init__(self, batch: MicroBatch, experience: Chunks[ExperienceChunk], device: torch.device) -> None:
        self._rows = batch.rows
        self._chunks = {row.chunk: experience[row.chunk] for row in batch.rows}
        self.mask = self.whole = response_mask(batch.tokens.response_lengths.tolist(), device=device)
        if any(row.sequence_tokens for row in batch.rows):  # a branch weighs as a part of its conversation
            lengths = [row.sequence_tokens or row.response_tokens for row in batch.rows]
            self.whole = response_mask(lengths, device=device)

    def __call__(self, name: str) -> Tensor:
        flat = gather(self._rows, {index: getattr(chunk, name) for index, chunk in self._chunks.items()})
        return align(torch.from_numpy(flat).to(self.mask.device), self.mask)

    def optional(self, name: str) -> Tensor | None:
        """Returns the column; None where the experience has none, or the micro-batch no rows."""
        present = any(getattr(chunk, name) is not None for chunk in self._chunks.values())
        return self(name) if present else None

    def mask_of(self, name: str) -> Tensor:
        """Returns a mask column, [B, R] bool; all response tokens without the column."""
        column = self.optional(name)
        return self.mask if column is None else column > 0


class LossInputs:
    """The inputs of a policy loss on a micro-batch, [B, R] each; see ``algos.policy_loss``. Each is made on demand.

    Args:
        new_logprobs: carries the gradient.
        entropy: likewise.
    """

    def __init__(self, algo: Algo, columns: ExperienceColumns, new_logprobs: Tensor, entropy: Tensor) -> None:
        self._algo = algo
        self._columns = columns
        self.new_logprobs = new_logprobs
        self.entropy = entropy
        self.response_mask = columns.mask

    @cached_property
    def old_logprobs(self) -> Tensor:
        """The log-probabilities in the ratio's denominator."""
        if self._algo.old_logprobs_from_update:
            return self.new_logprobs.detach()
        old = self._columns("old_logprobs")
        method = self._algo.correction.old_logprobs
        if method in ("loglinear", "linear"):
            return proximal_logprobs(old, self.new_logprobs, self._columns("proximal_weights"), method=method)
        return old

    @cached_property
    def rollout_logprobs(self) -> Tensor:
        return self._columns("rollout_logprobs")

    @cached_property
    def ref_logprobs(self) -> Tensor:
        return self._columns("ref_logprobs")

    @cached_property
    def advantages(self) -> Tensor:
        return self._columns("advantages")

    @cached_property
    def values(self) -> Tensor:
        return self._columns("old_values")


class _Aggregation:
    """Sums terms per token with weights that contain the step's denominators, which count all response tokens."""

    def __init__(self, algo: Algo, schedule: RankSchedule) -> None:
        self._weights = bound(AGGREGATIONS, algo.aggregation.name, algo.aggregation.options)
        self._totals = {"total_tokens": schedule.total_response_tokens, "total_sequences": schedule.total_sequences}

    def __call__(
        self, terms: LossTerms, parts: Mapping[str, Tensor], of: ExperienceColumns, *, learned: Tensor, reported: Tensor
    ) -> tuple[Tensor, LossMetrics]:
        """Returns the loss and its metrics.

        Args:
            parts: [B, R] by name, aggregated like the loss and reported as ``NAME_loss``.
            learned: [B, R] bool, the tokens in the loss.
            reported: [B, R] bool, the tokens over which metrics are means.
        """
        mask = of.mask
        weights = on_mask(self._weights(of.whole, **self._totals)[:, : mask.shape[1]], learned)
        metrics = collect(terms, reported, token_mean(mask, **self._totals, dtype=torch.float64))
        sums = {f"{name}_loss": weighted_sum(part.detach(), weights) for name, part in parts.items()}
        return weighted_sum(terms.values, weights), replace(metrics, sums={**metrics.sums, **sums})


class PolicyLoss:
    """The actor's loss: share * (w * policy loss + kl_coef * KL - entropy_coef * entropy), w by ``algo.correction``.

    Args:
        kl_coef: of a penalty in the loss, per nat.
        reference: of the engine's layout; required where the penalty compares whole distributions.
        token_values: receives the ratio of each token, and where a clip decided; None keeps nothing.
    """

    def __init__(
        self,
        engine: ModelEngine,
        spec: PolicySpec,
        experience: Chunks[ExperienceChunk],
        schedule: RankSchedule,
        *,
        kl_coef: float,
        reference: ModelEngine | None = None,
        token_values: TokenValues | None = None,
    ) -> None:
        algo = spec.algo
        self._engine = engine
        self._spec = spec
        self._experience = experience
        self._token_values = token_values
        self._algo = algo
        self._kl_coef = kl_coef
        self._reads = algo.loss_reads
        self._per_token = bound(POLICY_LOSSES, algo.policy_loss.name, algo.policy_loss.options)
        self._aggregate = _Aggregation(algo, schedule)
        self._divergence: ReferenceDivergence | None = None
        if algo.kl.reads_distributions:
            assert reference is not None, "the penalty is of the reference's distributions"
            self._divergence = ReferenceDivergence(
                engine, reference, experience, schedule, temperature=spec.temperature
            )

    def __call__(self, batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, LossMetrics]:
        columns = ExperienceColumns(batch, self._experience, hidden.device)
        mask = columns.mask
        flat, entropy = response_logprobs(
            self._engine.model, batch, hidden, vocab_size=self._engine.vocab_size, temperature=self._spec.temperature
        )
        inputs = LossInputs(self._algo, columns, align(flat, mask), align(entropy, mask))
        new = inputs.new_logprobs
        terms = self._per_token(**{name: getattr(inputs, name) for name in self._reads})
        self._keep_token_values(batch, mask, terms)
        if "old_logprobs" in self._reads:
            terms = _with_metrics(terms, ppo_kl=inputs.old_logprobs - new)
        terms = weighted(terms, self._weights(inputs, columns))
        parts = {"policy": terms.values}
        if self._algo.kl.placement == "loss" and self._algo.kl.coef > 0:
            if self._divergence is None:
                parts["kl"] = self._kl(inputs)
            else:
                parts["kl"] = align(self._divergence(batch, hidden), mask)
            terms = with_term(terms, "kl", parts["kl"], coef=self._kl_coef)
        terms = with_term(terms, "entropy", inputs.entropy, coef=-self._algo.entropy_coef)
        learned = columns.mask_of("actor_mask")
        loss, metrics = self._aggregate(terms, parts, columns, learned=learned, reported=mask)
        if not self._algo.has_logprob_pass:
            metrics = replace(metrics, quotients=self._actor_metrics(new.detach(), columns))
        return self._spec.share * loss, metrics

    def _keep_token_values(self, batch: MicroBatch, mask: Tensor, terms: LossTerms) -> None:
        """Copies the ratio and the clip of each token, where they are wanted; a user's own loss may lack them."""
        if self._token_values is None:
            return
        named = {"ratio": terms.spreads.get("ratio"), "clipped": terms.metrics.get("clipfrac")}
        for name, values in named.items():
            if values is None:
                continue
            parts = values[mask].float().cpu().split(mask.sum(-1).tolist())
            for row, part in zip(batch.rows, parts, strict=True):
                self._token_values.setdefault((row.chunk, row.row), {})[name] = part.numpy()

    def _actor_metrics(self, new: Tensor, columns: ExperienceColumns) -> Means:
        """Returns what ``experience.build`` reports where the actor's log-probabilities are known before the update."""
        mask = columns.mask
        scored = (columns.mask_of("scored_mask") | ~mask).all(-1)
        kl = k1(new, columns("ref_logprobs"))[scored] if self._algo.kl.coef > 0 else None
        means = dict(policy_drift(new[scored], kl, mask[scored], columns.whole[scored].sum(-1)))
        if self._algo.old_logprobs_from_update:
            rollout = columns("rollout_logprobs")
            means |= mismatch(new, rollout, mask)
            if oldest := self._spec.max_staleness:
                means |= gaps_by_age(new, rollout, mask, columns("ages"), oldest=oldest)
        return means

    def _weights(self, inputs: LossInputs, columns: ExperienceColumns) -> Tensor:
        """Returns the factors of the policy loss: the experience's, and those that depend on the policy in training."""
        correction = self._algo.correction
        mask = columns.mask
        weights = columns.optional("weights")
        if weights is None:
            weights = mask.to(inputs.new_logprobs.dtype)
        if correction.weights is not None and correction.interpolates:
            weigh = bound(ROLLOUT_WEIGHTS, correction.weights.name, correction.weights.options)
            # Without a reduction over ranks: a micro-batch computes its weights by itself.
            weights = weights * weigh(inputs.old_logprobs, inputs.rollout_logprobs, mask, lambda vector: vector)
        if correction.sequence_mask is not None:
            weights = weights * off_policy_sequences(
                inputs.new_logprobs,
                inputs.rollout_logprobs,
                inputs.advantages,
                mask,
                delta=correction.sequence_mask.delta,
            )
        return weights

    def _kl(self, inputs: LossInputs) -> Tensor:
        """Returns the estimated KL, [B, R] nats."""
        kl = self._algo.kl
        new = inputs.new_logprobs
        ref = inputs.ref_logprobs
        estimate = bound(KL_ESTIMATORS, kl.estimator.name, kl.estimator.options)
        if not kl.importance:
            return estimate(new, ref)
        ratio = (new - inputs.old_logprobs).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        return estimate(new, ref, ratio)


class ReferenceDivergence:
    """KL(policy || reference) at each response token of an optimizer step; collective over the engine's ranks.

    The reference, of the same layout in the same processes, first runs all micro-batches of the step and keeps a hidden
    state per token on its last stage; the logits of both models exist for a chunk of tokens at a time.
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
        self._engine = engine
        self._reference = reference
        self._temperature = temperature
        batches = micro_batches(reference.model, schedule, chunks)
        states = run_forward(reference.model, batches, schedule.pack_tokens, partial(response_states, reference.model))
        # Stages before the last have no states.
        self._states = {batch.rows: state for batch, state in zip(batches, states, strict=False)}

    def __call__(self, batch: MicroBatch, hidden: Tensor) -> Tensor:
        """Returns [T] nats, differentiable in the engine's hidden states and output layer."""
        model = self._engine.model
        weight, ref_weight = (of.chunks[-1].output_weight() for of in (model, self._reference.model))
        shard = vocab_shard(model.groups.tp, len(weight), self._engine.vocab_size)
        states = response_states(model, batch, hidden)
        ref_states = self._states[batch.rows]
        return divergence(states, weight, ref_states, ref_weight, shard, temperature=self._temperature)


class ValueLoss:
    def __init__(
        self, engine: ModelEngine, algo: Algo, experience: Chunks[ExperienceChunk], schedule: RankSchedule
    ) -> None:
        self._engine = engine
        self._experience = experience
        self._per_token = bound(VALUE_LOSSES, algo.value_loss.name, algo.value_loss.options)
        self._aggregate = _Aggregation(algo, schedule)

    def __call__(self, batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, LossMetrics]:
        columns = ExperienceColumns(batch, self._experience, hidden.device)
        values = align(response_values(self._engine.model, batch, hidden), columns.mask)
        returns = columns("returns")
        terms = self._per_token(values, columns("old_values"), returns)
        terms = _with_metrics(terms, error=(values - returns).square())
        terms = replace(terms, spreads={**terms.spreads, "returns": returns})
        selected = columns.mask_of("scored_mask")
        return self._aggregate(terms, {}, columns, learned=selected, reported=selected)


def _with_metrics(terms: LossTerms, **metrics: Tensor) -> LossTerms:
    """Adds metrics that a user's own loss may lack."""
    return replace(terms, metrics={**{name: values.detach() for name, values in metrics.items()}, **terms.metrics})


class TextLoss:
    """The mean negative log-likelihood per response token of the step, nats.

    Args:
        mix_share: factor of the loss beside a policy loss, where its only metric is ``ptx_loss``.
    """

    def __init__(self, engine: ModelEngine, schedule: RankSchedule, *, mix_share: float | None = None) -> None:
        self._engine = engine
        self._mix_share = mix_share
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

    The responses of a preference are neighbours in a pack, the best one first. The spread ``score`` covers all of them.
    """

    def __init__(
        self, engine: ModelEngine, settings: Choice, chunks: Chunks[TextChunk], schedule: RankSchedule
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._chunks = chunks
        self._responses = schedule.rows_per_unit
        self._rows = max(schedule.total_rows, 1)

    def __call__(self, batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, LossMetrics]:
        responses = self._responses
        assert _are_units(batch.rows, responses), "a pack holds whole preferences, the best response first"
        scores = row_scores(self._engine.model, batch, hidden)
        terms = self._per_preference(batch, hidden, scores.view(-1, responses))
        detached = scores.detach()
        spread = LossTerms(values=detached, metrics={}, spreads={"score": detached})
        metrics = _mean(terms, responses / self._rows)
        of_scores = _mean(spread, 1 / self._rows)
        loss = terms.values.sum() * (responses / self._rows)
        return loss, replace(of_scores, means={**metrics.means, **of_scores.means})

    def _per_preference(self, batch: MicroBatch, hidden: Tensor, scores: Tensor) -> LossTerms:
        """Returns terms [U] of scores [U, N]."""
        match (settings := self._settings).name:
            case "pairwise":
                margins = self._margins(batch, scores) if settings.options["margin"] else None
                chosen, rejected = scores.unbind(-1)
                return pairwise(chosen, rejected, margins, **settings.options)
            case "best_of_n":
                # The best one last, so that it does not count as found where another has the same score.
                best = torch.full((len(scores),), scores.shape[1] - 1, device=scores.device)
                return best_of_n(scores.flip(-1), best)
            case "span":
                # A pack without rows has no spans; the pairwise terms are as empty.
                return self._span(batch, hidden) if batch.rows else pairwise(*scores.unbind(-1))
            case _:
                return bound(PREFERENCE_LOSSES, settings.name, settings.options)(*scores.unbind(-1))

    def _margins(self, batch: MicroBatch, scores: Tensor) -> Tensor:
        margins: list[float] = []
        for row in batch.rows[0::2]:
            column = self._chunks[row.chunk].margins
            assert column is not None, "the rows were read without their margins"
            margins.append(float(column[row.row]))
        return torch.tensor(margins, dtype=scores.dtype, device=scores.device)

    def _span(self, batch: MicroBatch, hidden: Tensor) -> LossTerms:
        """Where the other response is longer, a response keeps the score of its last token."""
        mask = response_mask(batch.tokens.response_lengths.tolist(), device=hidden.device)
        scores = align(token_scores(self._engine.model, batch, hidden), mask)
        last = scores.gather(-1, mask.sum(-1, keepdim=True) - 1)
        held = torch.where(mask, scores, last)
        no_token = -1
        ids = torch.full_like(mask, no_token, dtype=torch.int64)
        ids[mask] = torch.from_numpy(batch.tokens.labels).to(mask.device)
        return span(held[0::2], held[1::2], spans_of(ids[0::2], ids[1::2], pad=no_token))


def _mean(terms: LossTerms, weight: float) -> LossMetrics:
    everything = torch.ones_like(terms.values, dtype=torch.bool)
    return collect(terms, everything, torch.full_like(terms.values, weight, dtype=torch.float64))


def _are_units(rows: Sequence[PackRow], size: int) -> bool:
    """Returns whether the rows are whole preferences of ``size`` responses, one after the other."""
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
    token_values: TokenValues | None = None,
) -> MakeLoss:
    """Returns the function that makes the loss of an optimizer step from its schedule; see ``PolicyLoss``."""
    match spec:
        case PolicySpec():
            return partial(
                PolicyLoss, engine, spec, chunks, kl_coef=kl_coef, reference=reference, token_values=token_values
            )
        case ValueSpec(algo=algo):
            return partial(ValueLoss, engine, algo, chunks)
        case PreferenceSpec(loss=settings):
            return partial(PreferenceLoss, engine, settings, chunks)
        case TextSpec():
            return partial(TextLoss, engine)


_POLICY_NAMES = {"loss": "loss/total", "policy_loss": "policy/loss", "kl_loss": "loss/kl", "ptx_loss": "loss/ptx"}


def _policy_name(name: str) -> str:
    public = name.startswith(("objective/", "rollout/", "rollout_corr/"))  # those of old log-probabilities
    return name if public else _POLICY_NAMES.get(name, f"policy/{name}")


def report(spec: LossSpec, step: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of an optimizer step under their public names."""
    match spec:
        case PolicySpec():
            return {_policy_name(name): value for name, value in step.items()}
        case ValueSpec():
            values = {f"value/{name}": value for name, value in step.items()}
            if "error" in step:  # absent if no response of the mini-batch has a score
                values["value/explained_variance_after"] = explained_variance(step["error"], step["returns_var"])
            return values
        case TextSpec(stage=stage) | PreferenceSpec(stage=stage):
            return {f"{stage}/{name}": value for name, value in step.items()}
