"""A group's processes and its roles: every call goes to all ranks of the group and returns references at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.cluster.calls import Call, Phase
from megarl.cluster.ray_worker import ChunkRefs
from megarl.cluster.session import Session
from megarl.config import RunConfig
from megarl.experience.padded_batch import Columns
from megarl.types import (
    Layout,
    RankSchedule,
    RoleName,
    RolloutChunk,
    Schedule,
    StepContext,
    TextChunk,
)

WORKER = "megarl.megatron.worker:MegatronWorker"


class WorkerGroup:
    """One Megatron process per device of a group; its roles take turns in the order of the calls.

    Args:
        session: where they run.
        config: of the run.
        name: of the group.
        target: ``package.module:Class`` of what each process runs.
    """

    def __init__(self, session: Session, config: RunConfig, name: str, target: str = WORKER) -> None:
        self.name = name
        self._session = session
        self.processes = [
            session.launch(f"{name} rank {rank}", [device], target, config, name, rank)
            for rank, device in enumerate(config.device_list(name))
        ]

    def start(self, model_dir: str) -> Call:
        """Connects the ranks, builds the roles and loads their weights."""
        address = self._session.free_address(self.processes[0])
        self.call(f"{self.name}.start", "start", "start", f"tcp://{address}")
        return self.call(f"{self.name}.load", "start", "load", model_dir)

    def call(
        self, label: str, phase: Phase, method: str, *args: Any, chunks: Sequence[Sequence[int]] | None = None
    ) -> Call:
        """Calls a method on every rank with the same arguments; see ``call_each``."""
        return self.call_each(label, phase, method, [args] * len(self.processes), chunks)

    def call_each(
        self,
        label: str,
        phase: Phase,
        method: str,
        args: Sequence[tuple[Any, ...]],
        chunks: Sequence[Sequence[int]] | None = None,
    ) -> Call:
        """Calls a method on every rank, with arguments of its own.

        Args:
            label: for messages.
            phase: whose time limit the call has.
            method: of the worker.
            args: the arguments of each rank.
            chunks: the chunks that each rank reports; None where the results are small.
        """
        return self._session.watch.submit(label, phase, method, self.processes, args, chunks)

    def rest(self) -> Call:
        """Offloads every role that may be."""
        return self.call(f"{self.name}.rest", "inference", "rest")

    def close(self) -> Call:
        """Lets the ranks end their world and give back their memory."""
        return self.call(f"{self.name}.close", "start", "close")


@dataclass(frozen=True, kw_only=True)
class Texts:
    """What optimizer steps take along.

    Args:
        schedules: one per optimizer step.
        chunks: by reference.
    """

    schedules: Sequence[Schedule]
    chunks: ChunkRefs[TextChunk]


class Role:
    """A role in its group. Columns are given and returned by reference, chunk by chunk.

    Args:
        group: that it is placed in.
        name: of the role.
        layout: of the role.
    """

    def __init__(self, group: WorkerGroup, name: RoleName, layout: Layout) -> None:
        self.group = group
        self.name: RoleName = name
        self.layout = layout

    def logprobs(self, schedule: Schedule, rollouts: ChunkRefs[RolloutChunk], *, temperature: float) -> Call:
        """Log-probabilities of the responses, nats, as its chunks."""

        def args(own: RankSchedule) -> tuple[Any, ...]:
            return self.name, own, rollouts.only(own.chunks), temperature

        return self._each("logprobs", schedule, args)

    def probe(self, schedule: Schedule, chunks: Sequence[TextChunk]) -> Call:
        """Log-probabilities at temperature 1 of a few given responses; ``merged`` reads the results."""
        args = [(self.name, own, {chunk: chunks[chunk] for chunk in own.chunks}, 1.0) for own in self._own(schedule)]
        return self.group.call_each(f"{self.name}.probe", "inference", "logprobs", args)

    def values(self, schedule: Schedule, rollouts: ChunkRefs[RolloutChunk]) -> Call:
        """Values of the responses' tokens, as its chunks."""
        return self._each("values", schedule, lambda own: (self.name, own, rollouts.only(own.chunks)))

    def scores(self, schedule: Schedule, chunks: ChunkRefs[RolloutChunk] | ChunkRefs[TextChunk]) -> Call:
        """Scores of the samples; ``merged`` reads the results."""
        args = [(self.name, own, chunks.only(own.chunks)) for own in self._own(schedule)]
        return self.group.call_each(f"{self.name}.scores", "inference", "scores", args)

    def token_scores(self, schedule: Schedule, rollouts: ChunkRefs[RolloutChunk]) -> Call:
        """Scores of the responses so far, one more than tokens, as its chunks; ``merged`` reads the samples'."""
        return self._each("token_scores", schedule, lambda own: (self.name, own, rollouts.only(own.chunks)))

    def build_experience(
        self, schedule: Schedule, rollouts: ChunkRefs[RolloutChunk], columns: Columns, terms: StepContext
    ) -> Call:
        """Experience by chunk, and as the small results an ExperienceReport; see ``megatron.experience``."""

        def args(own: RankSchedule) -> tuple[Any, ...]:
            return own, rollouts.only(own.chunks), columns.only(own.chunks), terms

        return self._each("build_experience", schedule, args)

    def update(
        self, schedules: Sequence[Schedule], chunks: ChunkRefs[Any], *, kl_coef: float = 0.0, texts: Texts | None = None
    ) -> Call:
        """Optimizer steps, one per schedule; ``reported`` reads their metrics.

        Args:
            chunks: what the role's loss reads.
            kl_coef: of a penalty in the loss, per nat.
            texts: what each step takes along; their packs are as long as the step's own.
        """
        own = self._parts(schedules, chunks)
        along = [()] * len(own) if texts is None else self._parts(texts.schedules, texts.chunks)
        args = [(self.name, *part, kl_coef, *text) for part, text in zip(own, along, strict=True)]
        return self.group.call_each(f"{self.name}.update", "update", "update", args)

    def skip_steps(self, steps: int) -> Call:
        """Goes on in the learning rate's course without these optimizer steps."""
        return self.group.call(f"{self.name}.skip_steps", "update", "skip_steps", self.name, steps)

    def swap_weights(self, wanted: bool) -> Call:
        """Gives the role the average of its weights for its weights, or its weights again."""
        return self.group.call(f"{self.name}.swap_weights", "inference", "swap_weights", self.name, wanted)

    def sync_reference(self) -> Call:
        """Lets the reference, of the same group, follow this role."""
        return self.group.call(f"{self.name}.sync_reference", "inference", "sync_reference")

    def evaluate(self, schedule: Schedule, chunks: ChunkRefs[TextChunk]) -> Call:
        """The role's loss without a step; ``reported`` reads its metrics."""
        args = [(self.name, own, chunks.only(own.chunks)) for own in self._own(schedule)]
        return self.group.call_each(f"{self.name}.evaluate", "inference", "evaluate", args)

    def scale_head(self, gain: float) -> Call:
        """Multiplies the role's head, and with it its scores."""
        return self.group.call(f"{self.name}.scale_head", "inference", "scale_head", self.name, gain)

    def save(self, directory: Path) -> Call:
        """Writes the role's part of a checkpoint; the results say what each rank wrote."""
        return self.group.call(f"{self.name}.save", "checkpoint", "save", self.name, str(directory / self.name))

    def restore(self, directory: Path) -> Call:
        """Reads the role's part of a checkpoint."""
        return self.group.call(f"{self.name}.restore", "checkpoint", "restore", self.name, str(directory / self.name))

    def export(self, directory: Path, template: str) -> Call:
        """Writes the role as a Hugging Face directory.

        Args:
            directory: to make.
            template: directory whose tokenizer and generation settings are copied.
        """
        return self.group.call(f"{self.name}.export", "checkpoint", "export", self.name, str(directory), template)

    def _parts(
        self, schedules: Sequence[Schedule], chunks: ChunkRefs[Any]
    ) -> list[tuple[tuple[RankSchedule, ...], ChunkRefs[Any]]]:
        """By rank, its parts of several passes, and the chunks that it reads in them."""
        parts: list[tuple[tuple[RankSchedule, ...], ChunkRefs[Any]]] = []
        for own in zip(*map(self._own, schedules), strict=True):
            read = {chunk for schedule in own for chunk in schedule.chunks}
            parts.append((own, chunks.only(sorted(read))))
        return parts

    def _own(self, schedule: Schedule) -> list[RankSchedule]:
        """By rank, the part of its replica: all that the rank is sent."""
        return [schedule.ranks[self.layout.coords(rank).dp] for rank in range(self.layout.world_size)]

    def _each(self, method: str, schedule: Schedule, args: Callable[[RankSchedule], tuple[Any, ...]]) -> Call:
        by_rank = [args(own) for own in self._own(schedule)]
        chunks = chunks_by_rank(schedule, self.layout)
        return self.group.call_each(f"{self.name}.{method}", "inference", method, by_rank, chunks)


def chunks_by_rank(schedule: Schedule, layout: Layout) -> list[tuple[int, ...]]:
    """The chunks that each rank reports: those of its DP rank where it has the results (TP 0, last stage)."""
    chunks: list[tuple[int, ...]] = []
    for rank in range(layout.world_size):
        coords = layout.coords(rank)
        reports = coords.tp == 0 and coords.pp == layout.pp - 1
        chunks.append(tuple(schedule.ranks[coords.dp].chunks) if reports else ())
    return chunks


def merged(call: Call) -> dict[int, Any]:
    """Waits for small columns, such as scores, and joins what the reporting ranks say of their chunks."""
    return {chunk: column for result in call.wait() if result is not None for chunk, column in result.items()}


def reported(call: Call) -> Any:
    """Waits for a call and returns what its reporting ranks all say; other ranks say nothing."""
    return next(result for result in call.wait() if result is not None)
