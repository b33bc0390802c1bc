"""The losses of supervised training, on texts and on preferences; see ``losses``.

Shape legend: B rows of the micro-batch, U preferences, N responses of each, P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megarl.algos.metrics import Means
from megarl.algos.policy_loss import LossTerms
from megarl.algos.preference_loss import best_of_n, pairwise, span
from megarl.algos.registry import (
    DIRECT_LOSSES,
    INPUTS_OF_REFERENCES,
    INPUTS_OF_RESPONSES,
    PREFERENCE_LOSSES,
    bound,
)
from megarl.config.schema import Choice
from megarl.data.packing import Chunks
from megarl.megatron.heads import response_logprobs, row_scores, token_scores
from megarl.megatron.loss_metrics import LossMetrics, collect
from megarl.megatron.model_engine import Loss, ModelEngine
from megarl.megatron.pipeline import MicroBatch
from megarl.megatron.staging import Places, padded_places, to_device
from megarl.types import FloatArray, RankSchedule, TextChunk


def text_loss(engine: ModelEngine, schedule: RankSchedule, *, mix_share: float | None = None) -> Loss:
    """Returns the mean negative log-likelihood per response token of the step, nats.

    Beside a policy loss, ``mix_share`` is its factor, and ``ptx_loss`` its only metric.
    """
    weight = 1 / max(schedule.total_response_tokens, 1)

    def loss(batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, LossMetrics]:
        logprobs, entropy = response_logprobs(engine.model, batch, hidden, temperature=1.0)
        total = -logprobs.sum() * weight
        if mix_share is not None:
            return mix_share * total, LossMetrics(sums={"ptx_loss": total.detach()})
        return total, LossMetrics(sums={"entropy": entropy.detach().sum() * weight})

    return loss


@dataclass(frozen=True)
class PreferenceLoss:
    """The reward model's loss: the mean over the preferences of the step; see ``algos.preference_loss``.

    The responses of a preference are neighbors in a pack, the best one first. The spread ``score``
    covers all of them.
    """

    engine: ModelEngine
    settings: Choice
    chunks: Chunks[TextChunk]
    schedule: RankSchedule

    def __call__(self, batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, LossMetrics]:
        responses = self.schedule.rows_per_unit
        rows = max(self.schedule.total_rows, 1)
        scores = row_scores(self.engine.model, batch, hidden)
        terms = self._per_preference(batch, hidden, scores.view(-1, responses))
        detached = scores.detach()
        spread = LossTerms(values=detached, metrics={}, spreads={"score": detached})
        share = responses / rows
        pair_metrics = _mean(terms, share)
        score_metrics = _mean(spread, 1 / rows)
        means = {**pair_metrics.means, **score_metrics.means}
        return terms.values.sum() * share, replace(score_metrics, means=means)

    def _per_preference(self, batch: MicroBatch, hidden: Tensor, scores: Tensor) -> LossTerms:
        """Returns terms [U] of scores [U, N]."""
        settings = self.settings
        if settings.name == "best_of_n":
            # The best one last, so that it is not found where another has the same score.
            best = torch.full((len(scores),), scores.shape[1] - 1, device=scores.device)
            return best_of_n(scores.flip(-1), best)
        chosen, rejected = scores.unbind(-1)
        if settings.name == "pairwise":
            margins = self._margins(batch, scores) if settings.options["margin"] else None
            return pairwise(chosen, rejected, margins, **settings.options)
        if settings.name == "span":
            if batch.rows:
                return self._span(batch, hidden)
            return pairwise(chosen, rejected)  # as empty as the spans of a pack without rows
        return bound(PREFERENCE_LOSSES, settings.name, settings.options)(chosen, rejected)

    def _margins(self, batch: MicroBatch, scores: Tensor) -> Tensor:
        margins: list[np.float32] = []
        for row in batch.rows[0::2]:
            column = self.chunks[row.chunk].margins
            assert column is not None, "the rows were read without their margins"
            margins.append(column[row.row])
        return to_device({"margins": np.array(margins, np.float32)}, scores.device)["margins"].to(scores.dtype)

    def _span(self, batch: MicroBatch, hidden: Tensor) -> LossTerms:
        """Where the other response is longer, a response keeps the score of its last token."""
        arrays, shape = padded_places(batch.tokens.response_lengths.tolist())
        places = Places(**to_device(arrays, hidden.device))
        scores = places.spread(token_scores(self.engine.model, batch, hidden)).view(shape)
        labels = batch.on_device["labels"]
        mask = places.spread(torch.ones_like(labels)).view(shape) > 0
        last = scores.gather(-1, mask.sum(-1, keepdim=True) - 1)
        held = torch.where(mask, scores, last)
        no_token = -1
        ids = places.spread(labels).view(shape).masked_fill(~mask, no_token)
        return span(held[0::2], held[1::2], ids[0::2], ids[1::2], no_token)


@dataclass
class DirectPreferenceLoss:
    """The policy's loss: the mean over a step's pairs or responses; see ``algos.direct_preference``.

    The responses of a pair are neighbors in a pack, the chosen one first.
    """

    engine: ModelEngine
    settings: Choice
    chunks: Chunks[TextChunk]
    schedule: RankSchedule

    def __post_init__(self) -> None:
        self._loss = bound(DIRECT_LOSSES, self.settings.name, self.settings.options)
        self._reads = DIRECT_LOSSES.reads(self.settings.name)

    def __call__(self, batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, LossMetrics]:
        share = self.schedule.rows_per_unit / max(self.schedule.total_rows, 1)
        rows, entropy = self._rows(batch, hidden)
        inputs = rows
        shown = {"logprob": rows["logprobs"].detach()}
        if self._reads.isdisjoint(INPUTS_OF_RESPONSES):
            inputs = _pairs(rows)
            shown = {f"logprob_{name}": inputs[name].detach() for name in ("chosen", "rejected")}
        terms = self._loss(**{name: inputs[name] for name in self._reads})
        metrics = _mean(replace(terms, metrics={**shown, **terms.metrics}), share)
        if "desirable" in rows and "reward" in terms.metrics:
            by_label = _by_label(terms.metrics["reward"], rows["desirable"])
            metrics = replace(metrics, means={**metrics.means, **by_label})
        mean_entropy = entropy.detach().sum() / max(self.schedule.total_response_tokens, 1)
        return terms.values.sum() * share, replace(metrics, sums={"entropy": mean_entropy})

    def _rows(self, batch: MicroBatch, hidden: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Returns the inputs by row, [B] each, and the entropy at each response token, [T]."""
        flat, entropy = response_logprobs(self.engine.model, batch, hidden, temperature=1.0)
        lengths = batch.tokens.response_lengths
        arrays, shape = padded_places(lengths.tolist())
        columns = {"tokens": lengths.astype(np.float32)}
        if not self._reads.isdisjoint(INPUTS_OF_REFERENCES):
            columns["ref_logprobs"] = self._column(batch, "ref_logprobs")
        if "desirable" in self._reads:
            columns["desirable"] = self._column(batch, "desirable")
        if "kl" in self._reads:
            divergence = [self.chunks[row.chunk].kl for row in batch.rows[:1]]
            columns["kl"] = np.array(divergence, dtype=np.float32)
        on_device = to_device({**arrays, **columns}, hidden.device)
        places = Places(position_of=on_device["position_of"], place_of=on_device["place_of"])
        rows = {name: on_device[name].to(flat.dtype) for name in columns}
        rows["logprobs"] = places.spread(flat).view(shape).sum(-1)
        return rows, entropy

    def _column(self, batch: MicroBatch, name: str) -> FloatArray:
        values: list[np.float32] = []
        for row in batch.rows:
            column = getattr(self.chunks[row.chunk], name)
            assert column is not None, f"the rows were read without {name}"
            values.append(column[row.row])
        return np.array(values, dtype=np.float32)


def _pairs(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the inputs of pairs, [P] each, of those of their rows."""
    inputs = {
        "chosen": rows["logprobs"][0::2],
        "rejected": rows["logprobs"][1::2],
        "chosen_tokens": rows["tokens"][0::2],
        "rejected_tokens": rows["tokens"][1::2],
    }
    if "ref_logprobs" in rows:
        inputs["ref_chosen"] = rows["ref_logprobs"][0::2]
        inputs["ref_rejected"] = rows["ref_logprobs"][1::2]
    return inputs


def _by_label(rewards: Tensor, desirable: Tensor) -> Means:
    """Returns the means of the rewards of desirable responses and of the others."""
    means: dict[str, tuple[Tensor, Tensor]] = {}
    for name, weights in (("desirable", desirable), ("undesirable", 1 - desirable)):
        means[name] = (rewards * weights).double().sum(), weights.double().sum()
    return means


def _mean(terms: LossTerms, weight: float) -> LossMetrics:
    everything = torch.ones_like(terms.values, dtype=torch.bool)
    return collect(terms, everything, torch.full_like(terms.values, weight, dtype=torch.float64))
