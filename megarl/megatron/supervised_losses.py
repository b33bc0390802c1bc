"""The losses of supervised stages on a micro-batch: from hidden states to weighted sums.

Each is a function of a step's schedule, whose totals are the denominators in the weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megarl.algos.preference import pairwise
from megarl.megatron.heads import response_logprobs, row_scores
from megarl.megatron.measures import Measures
from megarl.megatron.pipeline import MicroBatch
from megarl.megatron.role import Loss, Role, StepLoss
from megarl.types import PackRow, RankSchedule


def sft_loss(role: Role) -> StepLoss:
    """The negative log-likelihood of demonstrations: the mean over the response tokens of the step, nats.

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


def preference_loss(role: Role, centering: float) -> StepLoss:
    """The reward model's loss on preference pairs: the mean over the pairs of the step; see algos.preference.

    Rows 2i and 2i + 1 of a chunk are the chosen and the rejected response of a pair, and neighbours in a pack.

    Args:
        centering: weight of the squared sum of a pair's scores.
    """

    def of_step(schedule: RankSchedule) -> Loss:
        weight = 2 / max(schedule.total_rows, 1)

        def loss(batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Measures]:
            assert _are_pairs(batch.rows), "a pack holds pairs, the chosen response first"
            scores = row_scores(role.model, batch, hidden)
            pairs = pairwise(scores[0::2], scores[1::2], centering=centering)
            metrics = {name: values.sum() * weight for name, values in pairs.metrics.items()}
            return pairs.values.sum() * weight, Measures(sums=metrics)

        return loss

    return of_step


def _are_pairs(rows: Sequence[PackRow]) -> bool:
    """Whether the rows are pairs, one after the other."""
    halves = zip(rows[0::2], rows[1::2], strict=False)
    return len(rows) % 2 == 0 and all(
        one.chunk == other.chunk and one.row % 2 == 0 and other.row == one.row + 1 for one, other in halves
    )
