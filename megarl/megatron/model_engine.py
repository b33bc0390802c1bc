"""One role on one rank: its model under its layout, and the passes that it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from megarl.algos.optimization import ema
from megarl.config.schema import Optimizer
from megarl.data.packing import Chunks, TokenChunk, scatter, scatter_scalars
from megarl.megatron.heads import response_logprobs, response_values, row_scores, token_scores
from megarl.megatron.loss_metrics import Measures, combined
from megarl.megatron.model import Recompute, build_model
from megarl.megatron.offload import HostCopy, release
from megarl.megatron.optimizer import Average, Course, Trainer, build_trainer, learning_rate, shards
from megarl.megatron.parallel import GroupCache, build_groups
from megarl.megatron.pipeline import MicroBatch, Work, micro_batches, run_forward, run_forward_backward
from megarl.models import ModelSpec
from megarl.types import HEADS, HeadName, Layout, PackRow, Ragged, RankSchedule, RoleName
from megarl.weights.shard_map import ShardMap

Chunk = TypeVar("Chunk", bound=TokenChunk)
Loss = Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, Measures]]
"""From a micro-batch and its hidden states to a weighted sum over its tokens, a scalar, and what else it tells."""

StepLoss = Callable[[RankSchedule], Loss]
"""The loss of an optimizer step, from its schedule."""


@dataclass(frozen=True, kw_only=True)
class Mixed(Generic[Chunk]):
    """Rows of another kind that optimizer steps take along, in micro-batches of their own.

    Args:
        schedules: one per optimizer step, under the padded length of the step's own.
        chunks: tokens and whatever columns the loss reads.
        loss_of: their loss in a step, which is added to the step's own.
    """

    schedules: Sequence[RankSchedule]
    chunks: Chunks[Chunk]
    loss_of: StepLoss


_HEAD = "output_layer.weight"

MAX_SKIPPED = 3
"""Optimizer steps in a row that end the run when each was skipped for a gradient that is not finite."""


class Role:
    """A model for inference, or with ``start_training`` for training. Every method is collective over the role's ranks.

    Schedules are those of this rank's replica. Results come back on one rank per replica, TP rank 0 of the last stage
    (``reports``); the others return None.

    Args:
        name: of the role, which decides its head.
        spec: of the architecture.
        layout: over all ranks of the world.
        rank: in the world.
        cache: of the world's process groups.
        vocab_size: token ids in use; ids from here on have no probability.
        dtype: of parameters and activations.
        trainable: whether ``start_training`` will follow.
        recompute: activations that the backward pass computes again.
    """

    def __init__(
        self,
        name: RoleName,
        spec: ModelSpec,
        layout: Layout,
        rank: int,
        cache: GroupCache,
        *,
        vocab_size: int,
        dtype: torch.dtype,
        trainable: bool,
        recompute: Recompute = "none",
    ) -> None:
        self.name, self.spec, self.layout = name, spec, layout
        self.vocab_size = vocab_size
        self.head: HeadName = HEADS[name]
        self.coords = layout.coords(rank)
        self.shard_map: ShardMap = spec.megatron_map(layout, rank, self.head)
        self.model = build_model(
            spec,
            layout,
            build_groups(layout, rank, cache),
            head=self.head,
            dtype=dtype,
            trainable=trainable,
            recompute=recompute,
        )
        self.trainer: Trainer | None = None
        self.average: Average | None = None
        self.steps_taken = 0
        """Optimizer steps so far, skipped ones too: how far the learning rate is on its course."""
        self.adam_steps = 0
        """Those of them that were taken."""
        self.skipped_in_a_row = 0
        """Optimizer steps that were skipped since the last that was not."""
        self._offloaded: HostCopy | None = None

    @property
    def reports(self) -> bool:
        return self.coords.tp == 0 and self.coords.pp == self.layout.pp - 1

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Sets every local parameter; before ``start_training``.

        Args:
            tensors: by the local names of the shard map.

        Raises:
            ValueError: a parameter is missing, unknown or of another shape.
        """
        assert self.trainer is None, "the optimizer would keep the old weights"
        parameters = self.model.parameters()
        if parameters.keys() != tensors.keys():
            raise ValueError(f"{self.name}: parameters {sorted(parameters.keys() ^ tensors.keys())} do not match")
        for name, parameter in parameters.items():
            if parameter.shape != tensors[name].shape:
                raise ValueError(f"{self.name}: {name} is {tuple(parameter.shape)}, not {tuple(tensors[name].shape)}")
            parameter.data.copy_(tensors[name])

    def start_training(
        self, settings: Optimizer, total_steps: int, *, together: int = 1, decay: float | None = None
    ) -> None:
        """Makes the optimizer, and the average of the weights, from the weights as they are.

        Args:
            total_steps, together: of the learning rate's course.
            decay: of the average; None keeps none.
        """
        self.trainer = build_trainer(self.model, settings, Course(total=total_steps, together=together))
        if decay is not None:
            self.average = Average(self.model, self.trainer, decay)

    @torch.no_grad()
    def follow(self, other: Role, weight: float) -> None:
        """Takes weight * other + (1 - weight) * own for its weights, computed in float32.

        Args:
            other: a role of the same model, head and layout.
            weight: of the other.
        """
        assert self.layout == other.layout, "the ranks have other parts of the weights"
        theirs = other.model.parameters()
        for name, parameter in self.model.parameters().items():
            parameter.copy_(ema(parameter.float(), theirs[name], decay=1 - weight))

    def forgo(self, steps: int) -> None:
        """Goes on in the learning rate's course as after so many optimizer steps, which are not taken."""
        self.steps_taken += steps

    @torch.no_grad()
    def scale_head(self, gain: float) -> None:
        """Multiplies the head, and with it everything that it says; collective over the role's ranks."""
        assert self.trainer is not None, f"{self.name} is not in training"
        for shard in shards(self.model, self.trainer):
            if shard.name.endswith(_HEAD):
                shard.main.mul_(gain)
        self.trainer.publish()

    def offload(self) -> int:
        """Moves parameters, their average and optimizer state to host memory; nothing, where they are there already.

        References to the parameters stay good for the time after ``onload``; until then every method that computes
        raises RuntimeError.

        Returns:
            Bytes that the device has got back.
        """
        if self._offloaded is not None:
            return 0
        state = () if self.trainer is None else self.trainer.state()
        average = () if self.average is None else self.average.values.values()
        self._offloaded = release([*self.model.parameters().values(), *state, *average])
        return self._offloaded.nbytes

    def onload(self) -> None:
        """Takes back what ``offload`` has moved, bit for bit; nothing, where it has not."""
        if self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None

    def logprobs(
        self, schedule: RankSchedule, chunks: Chunks[TokenChunk], *, temperature: float
    ) -> dict[int, Ragged] | None:
        """Log-probability of each response token, nats, by chunk."""

        def outcome(batch: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
            return response_logprobs(self.model, batch, hidden, vocab_size=self.vocab_size, temperature=temperature)[0]

        return self._per_token(schedule, chunks, outcome)

    def values(self, schedule: RankSchedule, chunks: Chunks[TokenChunk]) -> dict[int, Ragged] | None:
        """The critic's value of the state before each response token, by chunk."""
        return self._per_token(schedule, chunks, lambda batch, hidden: response_values(self.model, batch, hidden))

    def scores(
        self, schedule: RankSchedule, chunks: Chunks[TokenChunk]
    ) -> dict[int, np.typing.NDArray[np.float32]] | None:
        """The reward model's score of each sample, [N] float32 by chunk."""
        flat = self._infer(schedule, chunks, lambda batch, hidden: row_scores(self.model, batch, hidden))
        return None if flat is None else scatter_scalars(_rows(schedule), flat)

    def token_scores(self, schedule: RankSchedule, chunks: Chunks[TokenChunk]) -> dict[int, Ragged] | None:
        """The reward model's scores of the responses so far, by chunk: before the first token, and after each.

        A row has one more than tokens; the last is that of ``scores``.
        """

        def outcome(batch: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
            before, after = (head(self.model, batch, hidden) for head in (response_values, token_scores))
            return torch.stack([before, after], -1)

        flat = self._infer(schedule, chunks, outcome)
        if flat is None:
            return None
        before, after = (scatter(_rows(schedule), flat[:, column]) for column in (0, 1))
        return {
            chunk: Ragged.from_rows(
                (np.concatenate([first[:1], rest]) for first, rest in zip(before[chunk], after[chunk], strict=True)),
                np.float32,
            )
            for chunk in after
        }

    def _per_token(
        self,
        schedule: RankSchedule,
        chunks: Chunks[TokenChunk],
        outcome: Callable[[MicroBatch, torch.Tensor], torch.Tensor],
    ) -> dict[int, Ragged] | None:
        flat = self._infer(schedule, chunks, outcome)
        return None if flat is None else scatter(_rows(schedule), flat)

    def _infer(
        self,
        schedule: RankSchedule,
        chunks: Chunks[TokenChunk],
        outcome: Callable[[MicroBatch, torch.Tensor], torch.Tensor],
    ) -> np.typing.NDArray[np.float32] | None:
        batches = micro_batches(self.model, schedule, chunks)
        results = run_forward(self.model, batches, schedule.pack_tokens, outcome)
        return torch.cat(results).cpu().numpy() if self.reports else None

    def update(
        self,
        schedules: Sequence[RankSchedule],
        chunks: Chunks[Chunk],
        loss_of: StepLoss,
        mixed: Mixed[Any] | None = None,
    ) -> list[dict[str, float]]:
        """Takes one optimizer step per schedule.

        Args:
            chunks: tokens and whatever columns the loss reads.
            loss_of: the loss of an optimizer step, whose weights hold its global denominators.
            mixed: what the steps take along, if anything.

        Returns:
            Per step ``loss``, what else the losses tell, ``grad_norm`` (before clipping), ``lr`` and ``skipped`` (1
            where the gradient was not finite), all global. Ranks before the last stage lack the loss and its metrics.

        Raises:
            FloatingPointError: too many steps in a row were skipped; on all ranks.
        """
        assert self.trainer is not None, f"{self.name} is not in training"
        assert self.average is None or not self.average.in_use, f"{self.name} has its average for its weights"
        with self.trainer.gradients():
            steps = []
            for index, schedule in enumerate(schedules):
                work = self._work(schedule, chunks, loss_of)
                if mixed is not None:
                    work += self._work(mixed.schedules[index], mixed.chunks, mixed.loss_of)
                steps.append(self._step(self.trainer, work, schedule.pack_tokens))
            return steps

    def evaluate(self, schedule: RankSchedule, chunks: Chunks[Chunk], loss_of: StepLoss) -> dict[str, float]:
        """``loss`` and what else the loss tells, as in ``update``, without a step; of a role in training or not.

        Returns:
            The metrics, all global; empty on ranks before the last stage.
        """
        batches = micro_batches(self.model, schedule, chunks)
        results = run_forward(self.model, batches, schedule.pack_tokens, _with_value(loss_of(schedule)))
        return self._combined([told for _, told in results])

    def _work(self, schedule: RankSchedule, chunks: Chunks[Chunk], loss_of: StepLoss) -> list[Work]:
        outcome = _with_value(loss_of(schedule))
        return [(batch, outcome) for batch in micro_batches(self.model, schedule, chunks)]

    def _step(self, trainer: Trainer, work: Sequence[Work], pack_tokens: int) -> dict[str, float]:
        trainer.zero_grad()
        told = run_forward_backward(self.model, trainer.chunks, work, pack_tokens, trainer.loss_factor)
        lr = learning_rate(trainer.settings, self.steps_taken, trainer.course)
        grad_norm, stepped = trainer.step(lr, self.adam_steps)
        self.steps_taken += 1
        self.adam_steps += stepped
        if stepped and self.average is not None:
            self.average.update()
        self.skipped_in_a_row = 0 if stepped else self.skipped_in_a_row + 1
        if self.skipped_in_a_row == MAX_SKIPPED:
            raise FloatingPointError(
                f"{self.name}: the gradient was not finite in {MAX_SKIPPED} optimizer steps in a row; "
                f"lower {self.name}.optimizer.lr, or look for what is not finite in the scores"
            )
        return {**self._combined(told), "grad_norm": grad_norm, "lr": lr, "skipped": float(not stepped)}

    def _combined(self, told: Sequence[Measures]) -> dict[str, float]:
        """Over micro-batches and replicas; nothing where this rank has none of it."""
        return combined(told, self.model.groups.dp) if told else {}


def _with_value(loss: Loss) -> Loss:
    """A loss that tells its value, too."""

    def told(batch: MicroBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, Measures]:
        value, measures = loss(batch, hidden)
        return value, replace(measures, sums={**measures.sums, "loss": value.detach()})

    return told


def _rows(schedule: RankSchedule) -> list[PackRow]:
    return [row for rows in schedule.packs for row in rows]
