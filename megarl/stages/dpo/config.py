"""The configuration of direct preference optimization and its relatives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import ValidationError

from megarl.algos.registry import INPUTS_OF_PAIRS
from megarl.config.problems import Broken
from megarl.config.schema import Actor, DirectReference, Groups, PairData, PreferenceTraining
from megarl.config.schema.base import raw_section
from megarl.config.schema.loss_specs import DirectPreferenceSpec, LossSpec
from megarl.config.schema.run_config import PreferenceConfig
from megarl.preflight.plan_text import choice_text, epochs_text, evaluation_times
from megarl.types import RoleName


class DPOConfig(PreferenceConfig):
    """Training of the role actor on preferences."""

    roles: ClassVar[tuple[RoleName, ...]] = ("actor", "reference")
    trained: ClassVar[tuple[RoleName, ...]] = ("actor",)
    trainer: ClassVar[str] = "megarl.stages.dpo.trainer:DPOTrainer"
    exports_initial_architecture: ClassVar[bool] = True

    stage: Literal["dpo"]  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen)
    """Direct preference optimization."""
    preference: PreferenceTraining = PreferenceTraining()
    """The loss, such as preference: {loss: {name: dpo, beta: 0.1}}."""
    reference: DirectReference = DirectReference()
    """The model that the policy is compared with, such as reference: {precompute: true}."""
    actor: Actor
    """The policy's training, such as actor: {optimizer: {lr: 5.0e-7}}."""

    @property
    def shown_metrics(self) -> tuple[str, ...]:
        metrics = ("dpo/loss", "dpo/accuracy", "dpo/margin", "dpo/kl", "dpo/lr", "dpo/grad_norm")
        return (*metrics, "perf/tokens_per_second", "time/step")

    @classmethod
    def default_roles(cls, raw: Mapping[str, Any]) -> list[RoleName]:
        loss = raw_section(raw, "preference").get("loss", {})
        try:
            settings = PreferenceTraining.model_validate({"loss": loss or "dpo"})
            reference = DirectReference.model_validate(raw_section(raw, "reference"))
        except ValidationError:  # which is reported with the other fields
            return ["actor"]
        roles: list[RoleName] = ["actor"]
        if settings.reads_reference and not reference.precompute:
            roles.append("reference")
        return roles

    def loss_spec(self, role: RoleName) -> LossSpec:
        return DirectPreferenceSpec(stage=self.stage, loss=self.preference.loss)

    def read_sets(self, reader: Any) -> Any:
        from megarl.preflight.datasets import pair_sets, rated_sets

        if self.preference.is_unpaired:
            return rated_sets(self.data, reader)
        return pair_sets(self.data, self.preference.loss, reader)

    def plan_lines(self, rows: Mapping[str, str], count: int) -> Iterator[tuple[str, str]]:
        data = self.data
        size = data.pairs_per_step
        yield "data", f"{data.train.path}: {rows['data.train']}; {epochs_text(self.steps, size, count)}"
        units = "pairs"
        if self.preference.is_unpaired:
            units = "responses"
        yield "step", f"{size} {units}, each response with its prompt up to {data.max_tokens} tokens"
        yield "loss", choice_text(self.preference.loss)
        if self.reference.precompute:
            yield "reference", "log-probabilities of all rows, by the actor before the first step"
        if data.evaluation is not None:
            times = evaluation_times(data.evaluate_every)
            yield "evaluation", f"{data.evaluation.path}: {rows['data.evaluation']}; {times}"


def losses_read_one_kind_of_rows(preference: PreferenceTraining, data: PairData) -> Iterator[Broken]:
    """A loss is of pairs or of single responses, and compares single ones with others of the step."""
    name = preference.loss.name
    reads = preference.reads
    if preference.is_unpaired and not reads.isdisjoint(INPUTS_OF_PAIRS):
        yield "preference.loss.name", "reads inputs of pairs and of single responses", "read those of one kind alone"
    if "kl" in reads and data.pairs_per_step < 2:
        rule = f"must be at least 2 with {name}, which reads responses to other prompts of the step"
        yield "data.pairs_per_step", rule, "set it to 2 or more"


def losses_have_their_reference(
    preference: PreferenceTraining, reference: DirectReference, groups: Groups
) -> Iterator[Broken]:
    """A group has the role reference if the loss reads its log-probabilities live, and only then."""
    is_there = any("reference" in group.roles for group in groups.values())
    name = preference.loss.name
    if reference.precompute:
        yield from _precomputed_are_read(preference, is_there=is_there)
        return
    if preference.reads_reference and not is_there:
        fix = "add the role reference to a group, set reference.precompute, "
        fix += "or choose a loss without one, such as simpo"
        yield "preference.loss.name", "reads log-probabilities under the role reference, which no group has", fix
    # The preflight reports a function that cannot be imported, or reads nothing that is known.
    if is_there and preference.reads and not preference.reads_reference:
        fix = "take the role reference out of its group, or choose a loss that reads it, such as dpo"
        yield (
            "preference.loss.name",
            f"{name} reads no reference, which has an effect with dpo, hinge, ipo or kto alone",
            fix,
        )


def _precomputed_are_read(preference: PreferenceTraining, *, is_there: bool) -> Iterator[Broken]:
    field = "reference.precompute"
    name = preference.loss.name
    if "kl" in preference.reads:
        rule = f"must be false with {name}, which reads the divergence of each step's weights"
        yield field, rule, "set it to false, and add the role reference to a group"
    elif preference.reads and not preference.reads_reference:
        fix = "set it to false, or choose dpo, hinge or ipo"
        yield field, f"has no effect with {name}, which reads no reference", fix
    if is_there:
        rule = "must be false with the role reference in a group: the actor computes them"
        yield field, rule, "take the role reference out of its group, or set it to false"
