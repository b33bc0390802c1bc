"""The configuration of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from megarl.config import SamplingConfig
from megarl.config.schema import Groups, HeldOut, RewardFunction, Run
from megarl.config.schema.base import raw_section
from megarl.config.schema.run_config import LargestBatches
from megarl.preflight.plan_text import lengths_text
from megarl.types import RoleName


class EvalConfig(SamplingConfig):
    """Evaluation of a checkpoint: responses to held-out prompts, and their scores."""

    roles: ClassVar[tuple[RoleName, ...]] = ("reward",)
    rows_in: ClassVar[str] = "evaluation"

    stage: Literal["eval"]  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen)
    """Evaluation."""
    run: Run
    """Directory and seed of the run, such as run: {dir: runs/mine}."""
    groups: Groups = Field(default={})  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen)
    """Groups of devices by name, with the role reward if a reward model scores."""
    evaluation: HeldOut  # pyright: ignore[reportIncompatibleVariableOverride, reportGeneralTypeIssues]  (frozen)
    """The prompts, and functions, such as evaluation: {prompts: p.jsonl, functions: [{name: last_number}]}."""

    @property
    def scored_functions(self) -> tuple[RewardFunction, ...]:
        return self.evaluation.functions

    @property
    def largest_batches(self) -> LargestBatches:
        return LargestBatches(tokens=self.rollout.max_model_len, inference=1 << 20, update=1)

    @classmethod
    def default_roles(cls, raw: Mapping[str, Any]) -> list[RoleName]:
        return [] if raw_section(raw, "reward").get("path") is None else ["reward"]

    def read_sets(self, reader: Any) -> Any:
        from megarl.preflight.datasets import prompt_sets

        return prompt_sets(self, reader)

    def plan_lines(self, rows: Mapping[str, str], count: int) -> Iterator[tuple[str, str]]:
        evaluation = self.evaluation
        how = "the likeliest" if evaluation.greedy else f"{evaluation.samples_per_prompt} sampled"
        yield "prompts", f"{evaluation.source}: {rows['evaluation.prompts']}; {how} for each"
        yield "lengths", lengths_text(self.rollout)
        sources: list[str] = []
        if self.has_role("reward"):
            sources.append(self.reward.path or "a random reward model")
        if self.environment is not None:
            sources.append("environment")
        sources += [function.name for function in evaluation.functions]
        scores = ", ".join(sources)
        if evaluation.pass_at:
            scores += f"; pass@k for k in {list(evaluation.pass_at)}"
        yield "scores", scores
