"""Samples and scores the rollouts of a step.

A step has `data.prompts_per_step` draws: a draw is a prompt with its `samples_per_prompt` responses.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from megarl.cluster.session import Session
from megarl.config import RolloutTrainingConfig, SamplingConfig
from megarl.config.schema import TruncateAt
from megarl.data.branches import Branches
from megarl.data.prompts import greedy_requests, sample_requests
from megarl.data.stream import Stream, StreamState
from megarl.groups.colocation import Colocation
from megarl.groups.conversations import Generator, launch_conversations
from megarl.groups.engines import RolloutGroup
from megarl.groups.judges import launch_judge
from megarl.groups.rollouts import PendingRollouts, Rollouts
from megarl.groups.scorers import launch_scorers
from megarl.groups.trainers import Service, Trainers
from megarl.loop.forward_passes import Forwards
from megarl.loop.scoring import SampleFilter, ScoredSamples, Scorer
from megarl.types import Prompt, SampleInfo

Scoring = asyncio.Future[ScoredSamples]
"""Scores that are being computed, or are known."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """The rollouts of some draws, and their scores.

    Args:
        prompts: one per draw.
        rollouts: in the order of the draws.
        forwards: forward passes that have begun, of each part of the samples.
        greedy_rollouts: greedy responses, one per different prompt, which are not trained on.
        greedy: scores of these.
        metrics: metrics of dynamic sampling.
    """

    prompts: Sequence[Prompt]
    rollouts: Rollouts
    scoring: Scoring
    forwards: Sequence[Forwards] = ()
    greedy_rollouts: Rollouts | None = None
    greedy: Scoring | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, kw_only=True)
class RolloutParts:
    """What samples and scores responses, of a run or an evaluation.

    Args:
        generator: the engines, or conversations with them.
        services: launched processes besides trainers and engines.
    """

    engines: RolloutGroup
    generator: Generator
    scorer: Scorer
    colocation: Colocation
    services: Sequence[Service] = ()

    @classmethod
    def launch(
        cls,
        config: SamplingConfig,
        session: Session,
        model_dir: str,
        trainers: Trainers,
        colocation: Colocation,
        truncate_at: TruncateAt | None = None,
    ) -> RolloutParts:
        """Launches the services, and returns at once; see `Scorer`."""
        engines = colocation.engines
        rules = launch_scorers(config, session, model_dir)
        conversations = launch_conversations(config, session, model_dir, engines)
        judge = launch_judge(config, session, rules)
        return cls(
            engines=engines,
            generator=conversations or engines,
            scorer=Scorer(config, trainers.roles, rules, engines, truncate_at, judge),
            colocation=colocation,
            services=[service for service in (rules, judge, conversations) if service is not None],
        )


@dataclass(frozen=True, kw_only=True)
class DynamicSampling:
    """Drops draws that a filter rejects, and draws further prompts until the step is full.

    Args:
        rounds: maximum rounds of generation; if the step is not full then, the first rejected draws fill it.
    """

    keep: SampleFilter
    rounds: int


class Sampler:
    """Samples and scores the rollouts of a step.

    Where engines have devices of their own, the scores of a part of the samples begin when its responses have arrived,
    and so do other forward passes over it. The parts do not depend on time, so neither do the results.

    Args:
        chunks: maximum number of chunks of a step's samples.
        begin_forwards: starts forward passes over a part of the samples.
        greedy: also score the greedy response to each prompt.
    """

    def __init__(
        self,
        config: RolloutTrainingConfig,
        prompts: Sequence[Prompt],
        parts: RolloutParts,
        chunks: int,
        *,
        dynamic: DynamicSampling | None = None,
        greedy: bool = False,
        begin_forwards: Callable[[Rollouts], Forwards] | None = None,
    ) -> None:
        self._stream = Stream(prompts, config.run.seed)
        self._engines = parts.engines
        self._generator = parts.generator
        self._scorer = parts.scorer
        self._colocation = parts.colocation
        self._functions = config.reward.functions
        self._prompts_per_step = config.data.prompts_per_step
        self._samples_per_prompt = config.data.samples_per_prompt
        self._seed = config.run.seed
        self._chunks = chunks
        self._parts = config.rollout.inference_parts
        self._dynamic = dynamic
        self._greedy = greedy
        self._begin_forwards = begin_forwards
        self._drawn: dict[int, list[str]] = {}  # the prompts of steps that have not been trained on
        self._asked: Counter[int] = Counter()  # how many of them were asked in this process

    async def sample(self, step: int) -> Sampled:
        """Generates the rollouts of a step and starts to score them; afterwards the trainers have the devices."""
        metrics: Mapping[str, float] = {}
        forwards: Sequence[Forwards] = ()
        greedy = None
        if self._dynamic is None:
            await self._colocation.to_rollout()
            prompts = self._draw(step)
            rollouts, scoring, forwards = await self._generate(prompts, (), step)
        else:
            prompts, rollouts, scoring, metrics = await self._filtered(self._dynamic, step)
        if self._greedy:
            await self._colocation.to_rollout()
            greedy = await self._generator.generate(greedy_requests(prompts, step=step), self._chunks).result()
        return await self.score(prompts, rollouts, greedy, metrics, scoring, forwards=forwards)

    async def score(
        self,
        prompts: Sequence[Prompt],
        rollouts: Rollouts,
        greedy_rollouts: Rollouts | None,
        metrics: Mapping[str, float],
        scoring: Scoring | None = None,
        greedy: Scoring | None = None,
        forwards: Sequence[Forwards] = (),
    ) -> Sampled:
        """Starts whatever scoring has not started yet; gives the devices to the trainers."""
        await self._colocation.to_training()
        if scoring is None:
            scoring = self._join([self._score(part, prompts) for part in rollouts.parts(self._parts)])
        if greedy is None and greedy_rollouts is not None:
            greedy = self._score(greedy_rollouts, prompts)
        return Sampled(
            prompts=prompts,
            rollouts=rollouts,
            scoring=scoring,
            forwards=forwards,
            greedy_rollouts=greedy_rollouts,
            greedy=greedy,
            metrics=metrics,
        )

    def prompt(self, prompt_id: str) -> Prompt:
        return self._stream[prompt_id]

    def forget(self, step: int) -> None:
        """Ends the record of a step's prompts, when it was trained on."""
        self._drawn.pop(step, None)
        del self._asked[step]

    def state(self) -> dict[str, Any]:
        """Returns the position in the prompts, and those of steps that have not been trained on."""
        drawn = {str(step): prompts for step, prompts in sorted(self._drawn.items())}
        return {**asdict(self._stream.state()), **({"drawn": drawn} if drawn else {})}

    def load(self, state: Mapping[str, Any]) -> None:
        """Loads `state()`; raises ValueError if the prompts have changed. Steps get the same prompts again."""
        position = {name: value for name, value in state.items() if name != "drawn"}
        self._stream.load(StreamState(**position))
        self._drawn = {int(step): list(prompts) for step, prompts in state.get("drawn", {}).items()}

    def _draw(self, step: int) -> list[Prompt]:
        """Returns the next prompts of a step; those that an earlier process drew come first."""
        drawn = self._drawn.setdefault(step, [])
        first = self._asked[step]
        self._asked[step] += self._prompts_per_step
        missing = max(self._asked[step] - len(drawn), 0)
        drawn += [prompt.prompt_id for prompt in self._stream.next(missing)]
        return [self._stream[prompt_id] for prompt_id in drawn[first : self._asked[step]]]

    async def _generate(
        self, prompts: Sequence[Prompt], earlier: Sequence[Prompt], step: int
    ) -> tuple[Rollouts, Scoring | None, Sequence[Forwards]]:
        """Generates samples of some prompts, whose ids and seeds continue those of the step's earlier prompts.

        Where the trainers have devices of their own, their scores and forward passes have begun.
        """
        requests = sample_requests([*earlier, *prompts], self._samples_per_prompt, seed=self._seed, step=step)
        pending = self._generator.generate(requests[len(earlier) * self._samples_per_prompt :], self._chunks)
        if self._colocation.shared:
            return await pending.result(), None, ()
        parts = [self._engines.spawn(self._begin(part, prompts)) for part in pending.parts(self._parts)]
        scorings: list[Scoring] = []
        forwards: list[Forwards] = []
        for part in parts:
            scoring, begun = await part
            scorings.append(scoring)
            forwards.append(begun)
        return await pending.result(), self._join(scorings), forwards

    async def _begin(self, part: PendingRollouts, prompts: Sequence[Prompt]) -> tuple[Scoring, Forwards]:
        """Starts forward passes and scores of a part of some samples when its responses have arrived."""
        rollouts = await part.result()
        forwards: Forwards = {}
        if self._begin_forwards is not None:
            forwards = self._begin_forwards(rollouts)
        return self._score(rollouts, prompts), forwards

    def _score(self, rollouts: Rollouts, prompts: Sequence[Prompt]) -> Scoring:
        """Starts to score rollouts."""
        by_id = {prompt.prompt_id: prompt for prompt in prompts}
        return self._engines.spawn(self._scorer.score(rollouts, by_id, self._functions))

    def _join(self, parts: Sequence[Scoring]) -> Scoring:
        """Returns the scores of all parts."""

        async def joined() -> ScoredSamples:
            return ScoredSamples.joined([await part for part in parts])

        return self._engines.spawn(joined())

    async def _filtered(
        self, dynamic: DynamicSampling, step: int
    ) -> tuple[list[Prompt], Rollouts, Scoring, Mapping[str, float]]:
        """Returns prompts, rollouts, scores and metrics of the first draws that pass the filter."""
        wanted = self._prompts_per_step
        size = self._samples_per_prompt
        prompts, rounds, scorings, kept = await self._rounds(dynamic, step)
        others = sorted(set(range(len(prompts))) - set(kept))
        chosen = sorted([*kept, *others][:wanted])
        rollouts = Rollouts.joined(rounds)
        conversations = [draw * size + index for draw in chosen for index in range(size)]
        branches = Branches.of(rollouts.samples)
        rows: list[int] = []
        for conversation in conversations:
            rows += branches.rows(conversation)
        if len(rows) < len(rollouts.samples):
            rollouts = await self._engines.pick(rollouts, [rollouts.samples[row] for row in rows], self._chunks)
        scored = ScoredSamples.joined(scorings)
        selected = ScoredSamples(
            samples=[scored.samples[row] for row in rows],
            scores={name: values[conversations] for name, values in scored.scores.items()},
            seconds=scored.seconds,
        )
        metrics = {
            "filter/rounds": len(rounds),
            "filter/groups": len(prompts),
            "filter/groups_kept": len(kept) / len(prompts),
            "filter/filled": max(wanted - len(kept), 0),
        }
        return [prompts[draw] for draw in chosen], rollouts, known_scores(selected), metrics

    async def _rounds(
        self, dynamic: DynamicSampling, step: int
    ) -> tuple[list[Prompt], list[Rollouts], list[ScoredSamples], list[int]]:
        """Samples rounds until enough draws pass; returns all draws, each round's samples, and which draws passed."""
        drawn: list[Prompt] = []
        rounds: list[Rollouts] = []
        scorings: list[ScoredSamples] = []
        kept: list[int] = []
        while len(rounds) < dynamic.rounds and len(kept) < self._prompts_per_step:
            await self._colocation.to_rollout()
            prompts = self._draw(step)
            rollouts, scoring, _ = await self._generate(prompts, drawn, step)
            if scoring is None:
                if self._scorer.model is not None:
                    await self._colocation.to_training()
                scoring = self._score(rollouts, prompts)
            scored = await scoring
            rounds.append(rollouts)
            scorings.append(scored)
            whole = Branches.of(scored.samples).whole(scored.samples)
            keeps = dynamic.keep(scored.scores, whole)[:: self._samples_per_prompt]
            kept += (len(drawn) + np.flatnonzero(keeps)).tolist()
            drawn += prompts
        return drawn, rounds, scorings, kept


def known_scores(scored: ScoredSamples) -> Scoring:
    """Returns scores that are known."""
    scoring = asyncio.get_running_loop().create_future()
    scoring.set_result(scored)
    return scoring


def sample_metrics(samples: Sequence[SampleInfo], max_new_tokens: int) -> dict[str, float]:
    """Returns metrics of the lengths and the ends of a step's rollouts; branches count as one."""
    samples = Branches.of(samples).whole(samples)
    finished = float(np.mean([sample.finished for sample in samples]))
    metrics: dict[str, float] = {"rollout/samples": len(samples)}
    for name in ("response", "prompt"):
        lengths = np.array([getattr(sample, f"{name}_tokens") for sample in samples])
        metrics[f"{name}_length/mean"] = float(lengths.mean())
        metrics[f"{name}_length/min"] = float(lengths.min())
        metrics[f"{name}_length/max"] = float(lengths.max())
    conversations = conversation_metrics(samples)
    if not conversations:  # of a conversation, each turn has this limit
        clipped = [sample.response_tokens >= max_new_tokens for sample in samples]
        metrics["response_length/clip_ratio"] = float(np.mean(clipped))
    return {**metrics, "truncated_fraction": 1 - finished, "stop_token_fraction": finished, **conversations}


def conversation_metrics(samples: Sequence[SampleInfo]) -> dict[str, float]:
    """Returns metrics of conversations with an environment, `environment/*`; none without one.

    Those of the environment itself are means over the conversations that have them.
    """
    outcomes = {sample.conversation: sample.outcome for sample in samples}
    held = [outcome for outcome in outcomes.values() if outcome is not None]
    if not held:
        return {}
    turns = np.array([outcome.turns for outcome in held])
    limits = Counter(outcome.limit for outcome in held if outcome.limit is not None)
    own: dict[str, list[float]] = {}
    for outcome in held:
        for name, value in outcome.metrics.items():
            own.setdefault(name, []).append(value)
    return {
        **{f"environment/{name}": float(np.mean(values)) for name, values in own.items()},
        "environment/turns/mean": float(turns.mean()),
        "environment/turns/max": int(turns.max()),
        "environment/failed": sum(outcome.failure is not None for outcome in held),
        "environment/truncated": float(np.mean([outcome.truncated for outcome in held])),
        **{f"environment/truncated/{limit}": count / len(held) for limit, count in limits.items()},
    }
