"""The configuration of PPO and its relatives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from megarl.config import RolloutTrainingConfig
from megarl.config.rules.scoring_rules import score_weights
from megarl.config.schema import PTX, Algo, Critic, Reference
from megarl.config.schema.base import raw_section
from megarl.config.schema.loss_specs import LossSpec, NewHead, PolicySpec, ValueSpec
from megarl.config.schema.run_config import LargestBatches
from megarl.preflight.plan_text import (
    choice_text,
    epochs_text,
    evaluation_times,
    every_steps,
    lengths_text,
    section_text,
)
from megarl.texts import counted
from megarl.types import RoleName


class PPOConfig(RolloutTrainingConfig):
    """PPO and its relatives."""

    roles: ClassVar[tuple[RoleName, ...]] = ("actor", "critic", "reference", "reward")
    trained: ClassVar[tuple[RoleName, ...]] = ("actor", "critic")
    trainer: ClassVar[str] = "megarl.stages.ppo.trainer:PPOTrainer"
    exports_initial_architecture: ClassVar[bool] = True

    stage: Literal["ppo"]  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen)
    """PPO."""
    algo: Algo = Algo()
    """The algorithm."""
    reference: Reference = Reference()
    """The model of the role reference, such as reference: {path: models/teacher}."""
    critic: Critic | None = None
    """The critic's training, if the algorithm has one."""
    ptx: PTX | None = None
    """Pretraining texts, on which the actor is trained together with the rollouts; null is none."""

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a trained role in one step of the run."""
        return self.algo.ppo_epochs * self.algo.mini_batches

    @property
    def saved(self) -> tuple[RoleName, ...]:
        """The roles in checkpoints, with a reference that moves towards the actor."""
        return super().saved if self.algo.kl.reference_sync is None else (*super().saved, "reference")

    @property
    def has_scores(self) -> bool:
        """Whether anything scores the responses; otherwise a teacher alone teaches."""
        return bool(score_weights(self.groups, self.reward, self.environment))

    @property
    def recorded_kept_max(self) -> int | None:
        if self.rollout.truncates and not self.algo.is_likelihood:
            return self.rollout.most_kept
        return None

    @property
    def replays_routes(self) -> bool:
        """Conversations do not have them."""
        return self.rollout.router_replay and not self.algo.is_likelihood and self.environment is None

    @property
    def teachers(self) -> Mapping[str, str]:
        return self.reference.teachers

    @property
    def teacher_column(self) -> str | None:
        return self.reference.column

    @property
    def critic_warmup_steps(self) -> int:
        """First steps of the run, in which the critic alone is trained."""
        return 0 if self.critic is None else self.critic.warmup_steps

    def optimizer_steps(self, role: RoleName) -> int:
        """Returns the optimizer steps of a trained role in the run; the actor has none in the critic's warm-up."""
        steps = self.steps
        if role == "actor":
            steps -= self.critic_warmup_steps
        return steps * self.updates_per_step

    @property
    def largest_batches(self) -> LargestBatches:
        update = -(-self.data.samples_per_step // self.algo.mini_batches)
        return LargestBatches(tokens=self.rollout.max_model_len, inference=self.data.samples_per_step, update=update)

    @property
    def shown_metrics(self) -> tuple[str, ...]:
        possible = {
            "objective/score": self.has_scores,
            "objective/kl": self.has_role("reference"),
            "select/score": self.algo.select is not None,
            "response_length/mean": True,
            "truncated_fraction": True,
            "group/zero_std_fraction": self.data.samples_per_prompt > 1,
            "policy/entropy": True,
            "policy/approxkl": not self.algo.is_likelihood,
            "policy/clipfrac": not self.algo.is_likelihood,
            "policy/grad_norm": True,
            "value/explained_variance": self.critic is not None,
            "rollout/logprob_gap": self.algo.has_logprob_pass or self.algo.old_logprobs_from_update,
            "time/rollout": True,
            "time/step": True,
        }
        return tuple(name for name, is_there in possible.items() if is_there)

    @classmethod
    def default_roles(cls, raw: Mapping[str, Any]) -> list[RoleName]:
        roles: list[RoleName] = ["actor"]
        if raw.get("critic") is not None:
            roles.append("critic")
        if raw_section(raw_section(raw, "algo"), "kl").get("coef"):
            roles.append("reference")
        if raw_section(raw, "reward").get("path") is not None:
            roles.append("reward")
        return roles

    def new_head(self, role: RoleName) -> NewHead | None:
        if role == "critic" and self.critic is not None and self.critic.head != "loaded":
            return NewHead(std=self.critic.head_std, seed=self.critic.head_seed)
        return super().new_head(role)

    @property
    def reference_weight(self) -> float | None:
        sync = self.algo.kl.reference_sync
        return None if sync is None else sync.weight

    def loss_spec(self, role: RoleName) -> LossSpec:
        if role == "critic":
            return ValueSpec(algo=self.algo)
        share = 1.0
        mix_share = 0.0
        if self.ptx is not None:
            from megarl.algos.optimization import ptx_shares  # imports torch, which a plan does without

            share, mix_share = ptx_shares(coef=self.ptx.coef, mode=self.ptx.mode)
        return PolicySpec(
            algo=self.algo,
            temperature=1.0 if self.algo.is_likelihood else self.rollout.temperature,
            share=share,
            mix_share=mix_share,
            max_staleness=self.rollout.max_staleness,
            value_norm=None if self.critic is None else self.critic.value_norm,
        )

    @property
    def mixed_texts(self) -> PTX | None:
        return self.ptx

    def read_sets(self, reader: Any) -> Any:
        from megarl.preflight.datasets import prompt_sets

        return prompt_sets(self, reader)

    def plan_lines(self, rows: Mapping[str, str], count: int) -> Iterator[tuple[str, str]]:
        data = self.data
        samples = counted(data.samples_per_step, "sample")
        epochs = epochs_text(self.steps, data.prompts_per_step, count)
        if self.algo.filter is not None:
            epochs = f"at least {epochs}"
        if data.curriculum.name != "uniform":
            steps = f"{counted(self.steps, 'step')} of {data.prompts_per_step}"
            epochs = f"in {steps}, chosen by {choice_text(data.curriculum)}"
        source = f"{count} random ones"
        if data.prompts is not None:
            source = f"{data.prompts.path}: {rows['data.prompts']}"
        elif data.tasks is not None:
            source = f"{count} tasks of the environment"
        yield "prompts", f"{source}; {epochs}"
        yield "step", f"{counted(data.prompts_per_step, 'prompt')} x {data.samples_per_prompt} = {samples}"
        yield "lengths", lengths_text(self.rollout)
        scores = "none: the actor learns from the reference alone"
        if self.has_scores:
            scores = " + ".join(_sources(self))
        if self.reward.shuffle:
            scores += ", shuffled"
        yield "scores", scores
        if self.teachers:
            named = [f"{name}: {path}" for name, path in self.teachers.items()]
            yield "reference", f"by {self.teacher_column}, {', '.join(named)}"
        elif self.reference.path is not None:
            yield "reference", self.reference.path
        yield "algo", section_text(self.algo)
        if self.algo.has_logprob_pass or self.algo.old_logprobs_from_update:
            yield "old logprobs", _old_logprobs(self)
        yield "update", _update(self)
        if self.ptx is not None:
            texts = f"{self.ptx.data.path} ({rows['ptx.data']})"
            yield "texts", f"{counted(self.ptx.sequences_per_mini_batch, 'row')} of {texts} in each of these"
        if self.rollout.sync_every > 1:
            yield "weights", f"into the engines {every_steps(self.rollout.sync_every)}"
        if self.actor.ema is not None:
            yield "average", f"of the actor, decay {self.actor.ema.decay:g}"
        if self.evaluation is not None:
            prompts = f"{self.evaluation.source}: {rows['evaluation.prompts']}"
            yield "evaluation", f"{prompts}; {evaluation_times(self.evaluation.every)}"


def _sources(config: PPOConfig) -> Iterator[str]:
    reward = config.reward
    if config.has_role("reward"):
        model = f"{reward.weight:g} x {reward.path or 'a random reward model'}"
        if reward.dense:
            model += f" after every token ({reward.dense})"
        yield model
    if config.environment is not None:
        yield f"{config.environment.weight:g} x environment"
    for function in reward.functions:
        yield f"{function.weight:g} x {function.name}"
    if reward.judge_model is not None:
        yield f"{reward.judge_model.weight:g} x judge"


def _update(config: PPOConfig) -> str:
    algo = config.algo
    mini_batches = counted(algo.mini_batches, "mini-batch")
    samples = counted(config.data.samples_per_step // algo.mini_batches, "sample")
    each = f"{mini_batches} of {samples}"
    if algo.select is not None:
        each = f"up to {mini_batches} of the selected samples"
    steps = counted(config.updates_per_step, "optimizer step")
    return f"{counted(algo.ppo_epochs, 'epoch')} x {each} = {steps}"


def _old_logprobs(config: PPOConfig) -> str:
    readers = config.algo.reads_old_logprobs
    if readers:
        return f"by a forward pass before the update, for {', '.join(readers)}"
    text = "those of the update, as a step is one optimizer step; no pass before it"
    if config.critic_warmup_steps:
        text += f"; in the critic's {counted(config.critic_warmup_steps, 'step')} alone by a pass"
    return text
