"""The losses of a micro-batch: from hidden states to weighted sums with the denominators of an optimizer step.

A loss is made from the schedule of an optimizer step, and called with each of its micro-batches.

Shape legend: B rows of the micro-batch, R response tokens of the longest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.algos.aggregation import token_mean, weighted_sum
from megarl.algos.kl import k1
from megarl.algos.metrics import Means, explained_variance, gaps_by_age, mismatch, policy_drift
from megarl.algos.normalization import on_mask
from megarl.algos.policy_loss import LossTerms, ratio_of, weighted, with_term
from megarl.algos.registry import (
    AGGREGATIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    ROLLOUT_WEIGHTS,
    VALUE_LOSSES,
    bound,
)
from megarl.algos.rollout_correction import off_policy_sequences, proximal_logprobs
from megarl.config.schema import Algo
from megarl.config.schema.loss_specs import (
    DirectPreferenceSpec,
    LossSpec,
    PolicySpec,
    PreferenceSpec,
    TextSpec,
    ValueSpec,
)
from megarl.data.packing import Chunks, TokenChunk, gather
from megarl.experience.padded_batch import response_mask
from megarl.experience.records import TOKEN_COLUMNS, ExperienceChunk
from megarl.megatron.heads import response_logprobs, response_states, response_values
from megarl.megatron.logprobs import divergence, vocab_shard
from megarl.megatron.loss_metrics import LossMetrics, collect
from megarl.megatron.model_engine import Loss, MakeLoss, ModelEngine
from megarl.megatron.pipeline import MicroBatch, micro_batches, run_forward
from megarl.megatron.staging import Places, padded_places, to_device
from megarl.megatron.supervised_losses import DirectPreferenceLoss, PreferenceLoss, text_loss
from megarl.types import RankSchedule, TokenValues


class ExperienceColumns:
    """The columns of a micro-batch's experience on a device, [B, R] each, 0 off the mask, in one transfer."""

    def __init__(self, batch: MicroBatch, experience: Chunks[ExperienceChunk], device: torch.device) -> None:
        self.rows = batch.rows
        lengths = batch.tokens.response_lengths.tolist()
        places, self._shape = padded_places(lengths)
        arrays = {**places, "mask": response_mask(lengths).numpy()}
        # A branch weighs as a part of its conversation.
        whole = [row.sequence_tokens or row.response_tokens for row in batch.rows]
        arrays["whole"] = response_mask(whole).numpy()
        chunks = {row.chunk: experience[row.chunk] for row in batch.rows}
        for name in TOKEN_COLUMNS:
            columns = {index: getattr(chunk, name) for index, chunk in chunks.items()}
            if any(column is not None for column in columns.values()):
                arrays[name] = gather(batch.rows, columns)
        if "scored_mask" in arrays:
            ends = np.cumsum(lengths)[:-1]
            scored = [row.all() for row in np.split(arrays["scored_mask"], ends)]
            arrays["scored_rows"] = np.flatnonzero(scored)
        self._flat = to_device(arrays, device)
        self._places = Places(position_of=self._flat["position_of"], place_of=self._flat["place_of"])
        self.mask = self._flat["mask"]
        self.whole = self._flat["whole"]

    def __call__(self, name: str) -> Tensor:
        column = self.optional(name)
        if column is None:
            assert not self.rows, f"the experience has no {name}"
            return self.mask.float()
        return column

    def align(self, flat: Tensor) -> Tensor:
        """Pads [T] values to [B, R]; gradients flow back to them."""
        return self._places.spread(flat).view(self._shape)

    def by_row(self, aligned: Tensor) -> Sequence[Tensor]:
        """Returns the values of each row in host memory, for which the host waits."""
        lengths = [row.response_tokens for row in self.rows]
        return self._places.collect(aligned.flatten()).cpu().split(lengths)

    def optional(self, name: str) -> Tensor | None:
        """Returns the column; None where the experience has none, or the micro-batch no rows."""
        return self.align(self._flat[name]) if name in self._flat else None

    def of_scored_rows(self, values: Tensor) -> Tensor:
        """Returns the rows, [B, ...], of which no token lacks a score."""
        rows = self._flat.get("scored_rows")
        return values if rows is None else values.index_select(0, rows)

    def selected(self, name: str) -> Tensor:
        """Returns a mask column, [B, R] bool; all response tokens without the column."""
        column = self.optional(name)
        return self.mask if column is None else column > 0


class LossInputs:
    """The inputs of a policy loss on a micro-batch, [B, R] each, made on demand; see ``algos.policy_loss``.

    ``new_logprobs`` and ``entropy`` carry their gradients.
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
            weights = self._columns("proximal_weights")
            return proximal_logprobs(old, self.new_logprobs, weights, method=method)
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


def aggregated(
    aggregate: Callable[..., Tensor],
    schedule: RankSchedule,
    terms: LossTerms,
    parts: Mapping[str, Tensor],
    columns: ExperienceColumns,
    *,
    learned: Tensor,
    reported: Tensor,
) -> tuple[Tensor, LossMetrics]:
    """Sums terms with weights whose denominators count all response tokens of the step.

    Returns the loss over the ``learned`` tokens, and metrics: means over the ``reported`` ones.

    Args:
        aggregate: one of AGGREGATIONS, with its options.
        parts: [B, R] by name, aggregated like the loss and reported as ``NAME_loss``.
    """
    mask = columns.mask
    totals = {
        "total_tokens": schedule.total_response_tokens,
        "total_sequences": schedule.total_sequences,
    }
    weights = on_mask(aggregate(columns.whole, **totals)[:, : mask.shape[1]], learned)
    metrics = collect(terms, reported, token_mean(mask, **totals, dtype=torch.float64))
    sums = {f"{name}_loss": weighted_sum(part.detach(), weights) for name, part in parts.items()}
    return weighted_sum(terms.values, weights), replace(metrics, sums=sums)


@dataclass
class PolicyLoss:
    """The actor's loss: share * (w * policy loss + kl_coef * KL - entropy_coef * entropy).

    The weights w are those of ``algo.correction``. The reference is there if the penalty compares
    whole distributions; ``token_values`` records the ratio and the clip of each token.
    """

    engine: ModelEngine
    spec: PolicySpec
    experience: Chunks[ExperienceChunk]
    schedule: RankSchedule
    kl_coef: float = field(kw_only=True)
    reference: ModelEngine | None = field(kw_only=True, default=None)
    token_values: TokenValues | None = field(kw_only=True, default=None)

    def __post_init__(self) -> None:
        algo = self.spec.algo
        self._per_token = bound(POLICY_LOSSES, algo.policy_loss.name, algo.policy_loss.options)
        self._aggregate = bound(AGGREGATIONS, algo.aggregation.name, algo.aggregation.options)
        self._divergence: ReferenceDivergence | None = None
        if algo.kl.reads_distributions:
            assert self.reference is not None, "the penalty is of the reference's distributions"
            self._divergence = ReferenceDivergence(
                self.engine,
                self.reference,
                self.experience,
                self.schedule,
                self.spec.temperature,
                algo.kl.estimator.options,
            )

    def __call__(self, batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, LossMetrics]:
        spec = self.spec
        algo = spec.algo
        columns = ExperienceColumns(batch, self.experience, hidden.device)
        mask = columns.mask
        flat, entropy = response_logprobs(self.engine.model, batch, hidden, spec.temperature)
        inputs = LossInputs(algo, columns, columns.align(flat), columns.align(entropy))
        new = inputs.new_logprobs
        terms = self._per_token(**{name: getattr(inputs, name) for name in algo.loss_reads})
        self._keep_token_values(columns, terms)
        if "old_logprobs" in algo.loss_reads:
            terms = _with_metric(terms, "ppo_kl", inputs.old_logprobs - new)
        terms = weighted(terms, self._weights(inputs, columns))
        parts = {"policy": terms.values}
        if algo.kl.placement == "loss" and algo.kl.coef > 0:
            if self._divergence is None:
                parts["kl"] = self._kl(inputs)
            else:
                parts["kl"] = columns.align(self._divergence(batch, hidden))
            terms = with_term(terms, "kl", parts["kl"], coef=self.kl_coef)
        terms = with_term(terms, "entropy", inputs.entropy, coef=-algo.entropy_coef)
        learned = columns.selected("actor_mask")
        loss, metrics = aggregated(
            self._aggregate, self.schedule, terms, parts, columns, learned=learned, reported=mask
        )
        if not algo.has_logprob_pass:
            actor_metrics = self._actor_metrics(new.detach(), columns)
            metrics = replace(metrics, means={**metrics.means, **actor_metrics})
        return spec.share * loss, metrics

    def _keep_token_values(self, columns: ExperienceColumns, terms: LossTerms) -> None:
        """Copies the ratio and the clip of each token, where they are wanted; a user's loss may lack them."""
        if self.token_values is None:
            return
        named = {"ratio": terms.spreads.get("ratio"), "clipped": terms.metrics.get("clipfrac")}
        for name, values in named.items():
            if values is None:
                continue
            for row, part in zip(columns.rows, columns.by_row(values.float()), strict=True):
                row_values = self.token_values.setdefault((row.chunk, row.row), {})
                row_values[name] = part.numpy()

    def _actor_metrics(self, new: Tensor, columns: ExperienceColumns) -> Means:
        """What ``experience.build`` reports if log-probabilities are known before the update."""
        mask = columns.mask
        of_scored_rows = columns.of_scored_rows
        kl = None
        if self.spec.algo.kl.coef > 0:
            kl = of_scored_rows(k1(new, columns("ref_logprobs")))
        tokens = of_scored_rows(columns.whole).sum(-1)
        means = dict(policy_drift(of_scored_rows(new), kl, of_scored_rows(mask), tokens))
        if self.spec.algo.old_logprobs_from_update:
            rollout = columns("rollout_logprobs")
            means |= mismatch(new, rollout, mask)
            if oldest := self.spec.max_staleness:
                means |= gaps_by_age(new, rollout, mask, columns("ages"), oldest=oldest)
        return means

    def _weights(self, inputs: LossInputs, columns: ExperienceColumns) -> Tensor:
        """Returns the factors of the policy loss: the experience's, and those of the policy in training."""
        correction = self.spec.algo.correction
        mask = columns.mask
        weights = columns.optional("weights")
        if weights is None:
            weights = mask.to(inputs.new_logprobs.dtype)
        if correction.weights is not None and correction.interpolates:
            weigh = bound(ROLLOUT_WEIGHTS, correction.weights.name, correction.weights.options)
            # Without a reduction over ranks: a micro-batch computes its weights by itself.
            weights = weights * weigh(inputs.old_logprobs, inputs.rollout_logprobs, mask, lambda vector: vector)
        if (sequence_mask := correction.sequence_mask) is not None:
            columns_read = (inputs.new_logprobs, inputs.rollout_logprobs, inputs.advantages)
            weights = weights * off_policy_sequences(*columns_read, mask, delta=sequence_mask.delta)
        return weights

    def _kl(self, inputs: LossInputs) -> Tensor:
        """Returns the estimated KL, [B, R] nats."""
        kl = self.spec.algo.kl
        new = inputs.new_logprobs
        estimate = bound(KL_ESTIMATORS, kl.estimator.name, kl.estimator.options)
        if not kl.importance:
            return estimate(new, inputs.ref_logprobs)
        ratio = ratio_of((new - inputs.old_logprobs).detach())
        return estimate(new, inputs.ref_logprobs, ratio)


class ReferenceDivergence:
    """Divergence from the reference at each response token of an optimizer step; collective.

    The reference, which may be the engine without its adapters, first runs all micro-batches of the step
    and keeps a hidden state per token on its last stage; logits exist for chunks of tokens.
    """

    def __init__(
        self,
        engine: ModelEngine,
        reference: ModelEngine,
        chunks: Chunks[TokenChunk],
        schedule: RankSchedule,
        temperature: float,
        options: Mapping[str, Any],
    ) -> None:
        assert engine.layout == reference.layout, "the ranks have other parts of the vocabulary"
        self._engine = engine
        self._reference = reference
        self._temperature = temperature
        self._options = options
        model = reference.model
        batches = micro_batches(model, schedule, chunks)
        with reference.adapters_as(on=reference is not engine):
            states = run_forward(
                model,
                batches,
                schedule.pack_tokens,
                partial(response_states, model),
            )
        # Stages before the last have no states.
        self._states = {batch.rows: state for batch, state in zip(batches, states, strict=False)}

    def __call__(self, batch: MicroBatch, hidden: Tensor) -> Tensor:
        """Returns [T] nats, differentiable in the engine's hidden states and output layer."""
        model = self._engine.model
        weight = model.chunks[-1].output_weight()
        ref_weight = self._reference.model.chunks[-1].output_weight()
        shard = vocab_shard(model.groups.tp, len(weight), model.vocab_size)
        states = response_states(model, batch, hidden)
        ref_states = self._states[batch.rows]
        of_chunks = partial(divergence, temperature=self._temperature, **self._options)
        return of_chunks(states, weight, ref_states, ref_weight, shard)


def value_loss(engine: ModelEngine, algo: Algo, experience: Chunks[ExperienceChunk], schedule: RankSchedule) -> Loss:
    """Returns the critic's loss for the micro-batches of an optimizer step."""
    per_token = bound(VALUE_LOSSES, algo.value_loss.name, algo.value_loss.options)
    aggregate = bound(AGGREGATIONS, algo.aggregation.name, algo.aggregation.options)

    def loss(batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, LossMetrics]:
        columns = ExperienceColumns(batch, experience, hidden.device)
        values = columns.align(response_values(engine.model, batch, hidden))
        returns = columns("returns")
        terms = per_token(values, columns("old_values"), returns)
        terms = _with_metric(terms, "error", (values - returns).square())
        terms = replace(terms, spreads={**terms.spreads, "returns": returns})
        selected = columns.selected("scored_mask")
        return aggregated(aggregate, schedule, terms, {}, columns, learned=selected, reported=selected)

    return loss


def _with_metric(terms: LossTerms, name: str, values: Tensor) -> LossTerms:
    """Adds a metric that a user's loss may lack."""
    return replace(terms, metrics={name: values.detach(), **terms.metrics})


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
                PolicyLoss,
                engine,
                spec,
                chunks,
                kl_coef=kl_coef,
                reference=reference,
                token_values=token_values,
            )
        case ValueSpec(algo=algo):
            return partial(value_loss, engine, algo, chunks)
        case PreferenceSpec(loss=settings):
            return partial(PreferenceLoss, engine, settings, chunks)
        case DirectPreferenceSpec(loss=settings):
            return partial(DirectPreferenceLoss, engine, settings, chunks)
        case TextSpec():
            return partial(text_loss, engine)


_POLICY_NAMES = {
    "loss": "loss/total",
    "policy_loss": "policy/loss",
    "kl_loss": "loss/kl",
    "ptx_loss": "loss/ptx",
}


def _policy_name(name: str) -> str:
    if name.startswith(("objective/", "rollout/", "rollout_corr/")):  # of old log-probabilities
        return name
    return _POLICY_NAMES.get(name, f"policy/{name}")


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
        case TextSpec(stage=stage) | PreferenceSpec(stage=stage) | DirectPreferenceSpec(stage=stage):
            return {f"{stage}/{name}": value for name, value in step.items()}
