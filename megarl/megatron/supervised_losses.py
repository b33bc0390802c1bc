"""The losses of supervised stages on a micro-batch: from hidden states to weighted sums.

Each is a function of a step's schedule, whose totals are the denominators in the weights.

Shape legend: U preferences of a pack, N responses of each, R response tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megarl.algos.policy_loss import LossTerms
from megarl.algos.preference_loss import best_of_n, pairwise, span, spans_of
from megarl.algos.registry import PREFERENCE_LOSSES, bound
from megarl.config.schema import Choice
from megarl.data.packing import Chunks
from megarl.experience.padded_batch import align, response_mask
from megarl.megatron.heads import response_logprobs, row_scores, token_scores
from megarl.megatron.loss_metrics import Measures, measured
from megarl.megatron.model_engine import Loss, Role, StepLoss
from megarl.megatron.pipeline import MicroBatch
from megarl.types import PackRow, RankSchedule, TextChunk

Comparison = Callable[[MicroBatch, Tensor, Tensor], LossTerms]
"""From a micro-batch, its hidden states and the scores of its responses, [U, N], to terms of its preferences, [U]."""


def sft_loss(role: Role) -> StepLoss:
    """The negative log-likelihood of the tokens that count: their mean over the step, nats.

    The metric ``entropy`` is that of the model's distribution.
    """

    def of_step(schedule: RankSchedule) -> Loss:
        weight = 1 / max(schedule.total_response_tokens, 1)

        def loss(batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Measures]:
            logprobs, entropy = response_logprobs(
                role.model, batch, hidden, vocab_size=role.vocab_size, temperature=1.0
            )
            return -logprobs.sum() * weight, Measures(sums={"entropy": entropy.detach().sum() * weight})

        return loss

    return of_step


def preference_loss(role: Role, settings: Choice, chunks: Chunks[TextChunk]) -> StepLoss:
    """The reward model's loss on preferences: the mean over those of the step; see ``algos.preference``.

    The responses of a preference are neighbours in a pack, the best one first. The spread ``score`` is of all of them.

    Args:
        settings: which loss.
        chunks: with the margins, where the loss has some.
    """
    compare = _comparison(role, settings, chunks)

    def of_step(schedule: RankSchedule) -> Loss:
        responses = schedule.rows_per_unit
        rows = max(schedule.total_rows, 1)

        def loss(batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Measures]:
            assert _are_units(batch.rows, responses), "a pack holds whole preferences, the best response first"
            scores = row_scores(role.model, batch, hidden)
            terms = compare(batch, hidden, scores.view(-1, responses))
            told, spread = _mean(terms, responses / rows), _mean(_spread(scores), 1 / rows)
            return terms.values.sum() * (responses / rows), replace(spread, means={**told.means, **spread.means})

        return loss

    return of_step


def _comparison(role: Role, settings: Choice, chunks: Chunks[TextChunk]) -> Comparison:
    """The loss that the settings name."""
    match settings.name:
        case "pairwise":
            options = settings.options

            def compare(batch: MicroBatch, hidden: Tensor, scores: Tensor) -> LossTerms:
                chosen, rejected = scores.unbind(-1)
                margins = _margins(batch, chunks, scores) if options["margin"] else None
                return pairwise(chosen, rejected, margins, **options)

        case "best_of_n":

            def compare(batch: MicroBatch, hidden: Tensor, scores: Tensor) -> LossTerms:
                # The best one last: where another scores as much, it does not count as found.
                best = torch.full((len(scores),), scores.shape[1] - 1, device=scores.device)
                return best_of_n(scores.flip(-1), best)

        case "span":

            def compare(batch: MicroBatch, hidden: Tensor, scores: Tensor) -> LossTerms:
                if not batch.rows:
                    return pairwise(*scores.unbind(-1))
                return _span(role, batch, hidden)

        case _:
            own = bound(PREFERENCE_LOSSES, settings.name, settings.options)

            def compare(batch: MicroBatch, hidden: Tensor, scores: Tensor) -> LossTerms:
                return own(*scores.unbind(-1))

    return compare


def _margins(batch: MicroBatch, chunks: Chunks[TextChunk], scores: Tensor) -> Tensor:
    """[U], the margins of a pack's pairs."""
    of_rows = [_margin(chunks[row.chunk], row.row) for row in batch.rows[0::2]]
    return torch.tensor(of_rows, dtype=scores.dtype, device=scores.device)


def _margin(chunk: TextChunk, row: int) -> float:
    assert chunk.margins is not None, "the rows were read without their margins"
    return float(chunk.margins[row])


def _span(role: Role, batch: MicroBatch, hidden: Tensor) -> LossTerms:
    """A response that has ended keeps the score of its last token, where the other one goes on."""
    assert batch.batch is not None
    mask = response_mask(batch.batch.response_lengths.tolist(), device=hidden.device)
    scores = align(token_scores(role.model, batch, hidden), mask)
    last = scores.gather(-1, mask.sum(-1, keepdim=True) - 1)
    held = torch.where(mask, scores, last)
    no_token = -1
    ids = torch.full_like(mask, no_token, dtype=torch.int64)
    ids[mask] = torch.from_numpy(batch.batch.labels).to(mask.device)
    return span(held[0::2], held[1::2], spans_of(ids[0::2], ids[1::2], pad=no_token))


def _spread(scores: Tensor) -> LossTerms:
    detached = scores.detach()
    return LossTerms(values=detached, metrics={}, spreads={"score": detached})


def _mean(terms: LossTerms, weight: float) -> Measures:
    everything = torch.ones_like(terms.values, dtype=torch.bool)
    return measured(terms, everything, torch.full_like(terms.values, weight, dtype=torch.float64))


def _are_units(rows: Sequence[PackRow], size: int) -> bool:
    """Whether the rows are whole preferences of so many responses, one after the other."""
    firsts = rows[0::size]
    return len(rows) % size == 0 and all(
        row.chunk == first.chunk and first.row % size == 0 and row.row == first.row + place
        for index, first in enumerate(firsts)
        for place, row in enumerate(rows[index * size : (index + 1) * size])
    )
