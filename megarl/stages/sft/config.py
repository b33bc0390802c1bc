"""The configuration of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from megarl.config import TrainingConfig
from megarl.config.schema import Actor, TextData
from megarl.config.schema.loss_specs import LossSpec, TextSpec
from megarl.config.schema.run_config import LargestBatches
from megarl.preflight.plan_text import epochs_text, evaluation_times
from megarl.texts import counted
from megarl.types import RoleName


class SFTConfig(TrainingConfig):
    """Supervised fine-tuning of the role actor."""

    roles: ClassVar[tuple[RoleName, ...]] = ("actor",)
    trained: ClassVar[tuple[RoleName, ...]] = ("actor",)
    trainer: ClassVar[str] = "megarl.stages.sft.trainer:SFTTrainer"
    exports_initial_architecture: ClassVar[bool] = True

    stage: Literal["sft"]  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen)
    """Supervised fine-tuning."""
    data: TextData
    """The demonstrations, such as data: {train: chats.jsonl, max_tokens: 1024, sequences_per_step: 8}."""
    actor: Actor
    """The policy's training, such as actor: {optimizer: {lr: 1.0e-5}}."""

    @property
    def rows_per_step(self) -> int:
        return self.data.sequences_per_step

    @property
    def largest_batches(self) -> LargestBatches:
        sequences = self.data.sequences_per_step
        return LargestBatches(tokens=self.data.max_tokens, inference=sequences, update=sequences)

    @property
    def shown_metrics(self) -> tuple[str, ...]:
        return ("sft/loss", "sft/lr", "sft/grad_norm", "perf/tokens_per_second", "time/step")

    def loss_spec(self, role: RoleName) -> LossSpec:
        return TextSpec(stage=self.stage)

    def read_sets(self, reader: Any) -> Any:
        from megarl.preflight.datasets import text_sets

        return text_sets(self.data, reader)

    def plan_lines(self, rows: Mapping[str, str], count: int) -> Iterator[tuple[str, str]]:
        data = self.data
        size = data.sequences_per_step
        yield "data", f"{data.train.path}: {rows['data.train']}; {epochs_text(self.steps, size, count)}"
        yield "step", f"{counted(size, 'sequence')} of up to {data.max_tokens} tokens"
        yield "loss", {"response": "on the responses", "all": "on all tokens"}[data.loss_on]
        if data.evaluation is not None:
            times = evaluation_times(data.evaluate_every)
            yield "evaluation", f"{data.evaluation.path}: {rows['data.evaluation']}; {times}"
