"""The losses of supervised training, on texts and on preferences; see ``losses``.

Shape legend: B rows of the micro-batch, U preferences, N responses of each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megarl.algos.policy_loss import LossTerms
from megarl.algos.preference_loss import best_of_n, pairwise, span
from megarl.algos.registry import PREFERENCE_LOSSES, bound
from megarl.config.schema import Choice
from megarl.data.packing import Chunks
from megarl.experience.padded_batch import align, response_mask
from megarl.megatron.heads import response_logprobs, row_scores, token_scores
from megarl.megatron.loss_metrics import LossMetrics, collect
from megarl.megatron.model_engine import Loss, ModelEngine
from megarl.megatron.pipeline import MicroBatch
from megarl.types import RankSchedule, TextChunk


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
        margins: list[float] = []
        for row in batch.rows[0::2]:
            column = self.chunks[row.chunk].margins
            assert column is not None, "the rows were read without their margins"
            margins.append(float(column[row.row]))
        return torch.tensor(margins, dtype=scores.dtype, device=scores.device)

    def _span(self, batch: MicroBatch, hidden: Tensor) -> LossTerms:
        """Where the other response is longer, a response keeps the score of its last token."""
        mask = response_mask(batch.tokens.response_lengths.tolist(), device=hidden.device)
        scores = align(token_scores(self.engine.model, batch, hidden), mask)
        last = scores.gather(-1, mask.sum(-1, keepdim=True) - 1)
        held = torch.where(mask, scores, last)
        no_token = -1
        ids = torch.full_like(mask, no_token, dtype=torch.int64)
        ids[mask] = torch.from_numpy(batch.tokens.labels).to(mask.device)
        return span(held[0::2], held[1::2], ids[0::2], ids[1::2], no_token)


def _mean(terms: LossTerms, weight: float) -> LossMetrics:
    everything = torch.ones_like(terms.values, dtype=torch.bool)
    return collect(terms, everything, torch.full_like(terms.values, weight, dtype=torch.float64))
