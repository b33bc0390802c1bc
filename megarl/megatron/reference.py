"""The reference's own distributions in an update, for a penalty on the whole of them and not on sampled tokens."""

from __future__ import annotations

import torch

from megarl.data.packing import Chunks, TokenChunk
from megarl.megatron.heads import response_divergence, response_states
from megarl.megatron.pipeline import MicroBatch, micro_batches, run_forward
from megarl.megatron.role import Loss, Role, StepLoss
from megarl.types import PackRow, RankSchedule


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
