"""Proximal policy optimization (Schulman et al., 2017) and its relatives, synchronous.

Every method of a role returns references at once: calls on one group run in the order of this file, calls on
different groups at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megarl.algos.controllers import kl_controller
from megarl.cluster.group import ExperienceColumns, reported
from megarl.cluster.resharder import Resharder
from megarl.cluster.rollouts import Rollouts
from megarl.cluster.session import Session
from megarl.cluster.shell import ChunkRefs
from megarl.config import PPOConfig
from megarl.data.prompts import sample_requests
from megarl.data.streams import Stream, StreamState
from megarl.loop.assets import model_directory, template_directory
from megarl.loop.datasets import PromptSets
from megarl.loop.directory import RunDirectory
from megarl.loop.evaluate import Evaluator
from megarl.loop.gate import check_agreement, scored_probe
from megarl.loop.samples import shown_samples
from megarl.loop.schedules import StepPlan
from megarl.loop.scoring import Scale, Scorer, columns_of, group_outcomes, permutation_seed, total_scores
from megarl.loop.setup import launch_engines, launch_rules, launch_trainers
from megarl.loop.stage import EvaluationResult, Metrics, StepResult
from megarl.loop.turns import Turns
from megarl.obs.timers import Timers
from megarl.types import ExperienceChunk, Prompt, SampleInfo
from megarl.weights.specs import model_spec


@dataclass(frozen=True, kw_only=True)
class Experience:
    """What came of a step's rollouts.

    Args:
        chunks: what updates read, by reference.
        sources: [N] scores by source, of the samples in their order.
        scores: [N], what the algorithm learns from.
        metrics: of all of it.
    """

    chunks: ChunkRefs[ExperienceChunk]
    sources: Mapping[str, npt.NDArray[np.float32]]
    scores: npt.NDArray[np.float32]
    metrics: Mapping[str, float]


class PPO:
    """A run of PPO: rollouts, scores, experience, updates, and the weights back into the engines.

    Args:
        config: of the run.
        session: where everything runs.
        directory: of the run.
        data: the prompts, and the tokenizer.
        phase: is told what the run does.
    """

    def __init__(
        self,
        config: PPOConfig,
        session: Session,
        directory: RunDirectory,
        data: PromptSets,
        phase: Callable[[str], None],
    ) -> None:
        self._config, self._data, self._phase = config, data, phase
        self._model_dir = model_directory(config, directory.path)
        self.trainers = launch_trainers(config, session)
        self._engines = launch_engines(config, config.rollout, session, self._model_dir, weights="sync")
        self._roles = self.trainers.roles
        spec = model_spec(config.model.hf_config())
        self._resharder = Resharder(session, config, self._roles["actor"], self._engines, spec)
        self._turns = Turns(self.trainers, self._engines, self._resharder, sleep=config.rollout.sleep)
        self._rules = launch_rules(config, session, self._model_dir)
        self._scorer = Scorer(model=self._roles.get("reward"), scale=Scale.read(config.reward.path), rules=self._rules)
        self._prompts = Stream(data.train, config.run.seed)
        self._kl = kl_controller(config.algo.kl.coef, target=config.algo.kl.target, horizon=config.algo.kl.horizon)
        self._evaluator = (
            Evaluator(config, data.held_out, self._engines, self._scorer, data.tokenizer, self.trainers.chunks)
            if config.evaluation is not None
            else None
        )
        self.evaluate_every = None if config.evaluation is None else config.evaluation.every

    def start(self) -> None:
        """Starts every process, loads every model, and connects the actor with the engines, still without weights."""
        engines = self._engines.start()
        rules = None if self._rules is None else self._rules.start()
        if self._config.rollout.sleep:
            engines.wait()  # asleep: starting both at once, the devices would have to hold both
        self.trainers.start(self._model_dir)
        engines.wait()
        if rules is not None:
            rules.wait()
        self._resharder.connect().wait()

    def begin(self, step: int) -> Metrics:
        """Brings the actor's weights into the engines, and looks whether both compute the same, each in its turn."""
        gate = self._config.resharding.gate
        scored = None if gate is None else scored_probe(self._config, self._roles["actor"])
        transfer = self._turns.to_engines(step)
        agreement = {} if scored is None else check_agreement(scored, self._engines).metrics()
        return {**transfer.metrics(), **agreement}

    def step(self, step: int) -> StepResult:
        """One iteration: rollouts under version ``step - 1``, an update, and version ``step`` in the engines."""
        timers = Timers(self._phase)
        with timers("step"):
            with timers("sync"):
                self._turns.back_to_engines(step - 1)  # after an evaluation or a checkpoint
            with timers("rollout"):
                prompts = self._prompts.next(self._config.data.prompts_per_step)
                rollouts = self._generate(prompts, step)
                self._turns.to_trainers()
            plan = StepPlan(self._config, rollouts.samples, step)
            with timers("experience"):
                experience = self._experience(prompts, rollouts, plan)
            with timers("update"):
                updates = self._update(experience, plan)
            with timers("sync"):
                transfer = self._turns.to_engines(step)
        self._kl.update(experience.metrics["objective/kl"], len(rollouts.samples))
        seconds = timers.take()
        tokens = sum(sample.tokens for sample in rollouts.samples)
        metrics = {
            "version": step,
            **experience.metrics,
            **sample_metrics(rollouts.samples),
            **transfer.metrics(),
            **seconds,
            "perf/tokens_per_second": tokens / seconds["time/step"],
        }
        shown = shown_samples(
            rollouts, experience.scores, experience.sources, self._data.tokenizer, self._config.tracking.samples
        )
        return StepResult(step=step, metrics=metrics, updates=updates, samples=shown)

    def _generate(self, prompts: Sequence[Prompt], step: int) -> Rollouts:
        """The engines answer the prompts."""
        requests = sample_requests(prompts, self._config.data.samples_per_prompt, seed=self._config.run.seed, step=step)
        return self._engines.generate(requests, self.trainers.chunks)

    def _experience(self, prompts: Sequence[Prompt], rollouts: Rollouts, plan: StepPlan) -> Experience:
        """The roles and the rules look at the rollouts, all at once; then the actor's ranks build what updates read."""
        config, temperature = self._config, self._config.rollout.temperature
        actor, critic, reference = self._roles["actor"], self._roles.get("critic"), self._roles.get("reference")
        scoring = self._scorer.submit(
            rollouts,
            {prompt.prompt_id: prompt for prompt in prompts},
            plan.inference("reward") if self._scorer.model is not None else None,
            config.reward.functions,
        )
        old = actor.logprobs(plan.inference("actor"), rollouts.chunks, temperature=temperature)
        ref = values = None
        if reference is not None:
            ref = reference.logprobs(plan.inference("reference"), rollouts.chunks, temperature=temperature)
        if critic is not None:
            values = critic.values(plan.inference("critic"), rollouts.chunks)
        sources = scoring.wait()
        seed = permutation_seed(config.run.seed, plan.step)
        scores = total_scores(sources, rollouts.samples, config.reward, config.algo, seed=seed)
        outcomes, of_groups = None, {}
        if config.algo.advantage.name == "grpo":
            outcomes, of_groups = group_outcomes(scores, rollouts.samples)
        columns = ExperienceColumns(
            old_logprobs=old,
            ref_logprobs=ref,
            values=values,
            scores=columns_of(scores, rollouts.samples),
            outcomes=None if outcomes is None else columns_of(outcomes, rollouts.samples),
        )
        building = actor.build_experience(plan.inference("actor"), rollouts.chunks, columns, kl_coef=self._kl.coef)
        of_sources = {f"scores/{name}": float(values.mean()) for name, values in sources.items()}
        metrics = {**reported(building), **of_groups, **of_sources}
        return Experience(chunks=building.chunks, sources=sources, scores=scores, metrics=metrics)

    def _update(self, experience: Experience, plan: StepPlan) -> list[dict[str, float]]:
        """Actor and critic take their optimizer steps; what they tell of each."""
        critic = self._roles.get("critic")
        calls = [self._roles["actor"].update(plan.update("actor"), experience.chunks, kl_coef=self._kl.coef)]
        if critic is not None:
            calls.append(critic.update(plan.update("critic"), experience.chunks))
        told = [reported(call) for call in calls]
        return [
            {name: value for of_role in of_step for name, value in of_role.items()}
            for of_step in zip(*told, strict=True)
        ]

    def evaluate(self, step: int) -> EvaluationResult | None:
        """Answers and scores the held-out prompts, with the weights of the last sync."""
        if self._evaluator is None:
            return None
        self._phase("evaluation")
        self._turns.back_to_engines(step)
        return self._evaluator.evaluate(step, self._turns.to_trainers)

    def make_room(self) -> None:
        """Lets engines sleep that share the devices."""
        self._turns.to_trainers()

    def state(self) -> dict[str, Any]:
        """Where the prompts and the penalty stand."""
        return {"prompts": asdict(self._prompts.state()), "kl": self._kl.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        self._prompts.load(StreamState(**state["prompts"]))
        self._kl.load(state["kl"])

    def finish(self, export: Path) -> Metrics:
        """Writes the actor."""
        self._phase("export")
        self.make_room()
        self._roles["actor"].export(export, template_directory(self._config, self._model_dir)).wait()
        return {}

    def close(self) -> None:
        """Lets every process end by itself."""
        engines = self._engines.close()
        self.trainers.close()
        engines.wait()


def sample_metrics(samples: Sequence[SampleInfo]) -> dict[str, float]:
    """What lengths and ends say of a step's rollouts."""
    lengths = np.array([sample.response_tokens for sample in samples])
    return {
        "rollout/samples": len(samples),
        "rollout/response_tokens_mean": float(lengths.mean()),
        "rollout/response_tokens_max": int(lengths.max()),
        "rollout/finished": float(np.mean([sample.finished for sample in samples])),
    }
