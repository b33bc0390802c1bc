"""Samples and scores the rollouts of a step.

A step has `data.prompts_per_step` draws: a draw is a prompt with its
`samples_per_prompt` responses.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megarl.cluster.session import Session
from megarl.config import RolloutTrainingConfig, SamplingConfig
from megarl.config.schema import TruncateAt
from megarl.data.branches import Branches
from megarl.data.prompt_curriculum import Curriculum
from megarl.data.prompts import greedy_requests, sample_requests
from megarl.data.stream import Stream
from megarl.groups.colocation import Colocation
from megarl.groups.conversations import ConversationGroup, launch_conversations
from megarl.groups.engines import RolloutGroup
from megarl.groups.judges import launch_judge
from megarl.groups.rollouts import PendingRollouts, Rollouts
from megarl.groups.scorers import launch_scorers
from megarl.groups.trainers import Service, Trainers
from megarl.loop.forward_passes import Forwards
from megarl.loop.scoring import SampleFilter, ScoredSamples, Scorer, scores_by_prompt
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
        metrics: metrics of dynamic sampling and of the curriculum.
        scores: of a curriculum with a filter, known scores of the prompts of all rounds, also of
            those that it rejected; None without a filter.
    """

    prompts: Sequence[Prompt]
    rollouts: Rollouts
    scoring: Scoring
    forwards: Sequence[Forwards] = ()
    greedy_rollouts: Rollouts | None = None
    greedy: Scoring | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    scores: Mapping[str, Sequence[float]] | None = None


@dataclass(frozen=True, kw_only=True)
class RolloutParts:
    """What samples and scores responses, of a run or an evaluation.

    Args:
        generator: the engines, or conversations with them.
        services: launched processes besides trainers and engines.
    """

    engines: RolloutGroup
    generator: RolloutGroup | ConversationGroup
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
        judge_engines = None if judge is None else judge.engines
        return cls(
            engines=engines,
            generator=conversations or engines,
            scorer=Scorer(config, trainers.roles, rules, engines, truncate_at, judge),
            colocation=colocation,
            services=[each for each in (rules, judge_engines, conversations) if each is not None],
        )


class Sampler:
    """Samples and scores the rollouts of a step.

    Where engines have devices of their own, the scores of a part of the samples begin when its
    responses have arrived, and so do other forward passes over it. The parts do not depend on time,
    so neither do the results.

    Args:
        chunks: maximum number of chunks of a step's samples.
        keep: filter of draws; further prompts are drawn for those that it rejects.
        max_rounds: maximum rounds of generation with a filter; then the first
            rejected draws fill the step.
        begin_forwards: starts forward passes over a part of the samples.
        greedy: also score the greedy response to each prompt.
        curriculum: chooses the prompts; None takes them in epochs.
    """

    def __init__(
        self,
        config: RolloutTrainingConfig,
        prompts: Sequence[Prompt],
        parts: RolloutParts,
        chunks: int,
        *,
        keep: SampleFilter | None = None,
        max_rounds: int = 1,
        greedy: bool = False,
        begin_forwards: Callable[[Rollouts], Forwards] | None = None,
        curriculum: Curriculum | None = None,
    ) -> None:
        self._config = config
        self._stream = Stream(prompts, config.run.seed)
        self._parts = parts
        self._prompts_per_step = config.data.prompts_per_step
        self._samples_per_prompt = config.data.samples_per_prompt
        self._chunks = chunks
        self._part_count = config.rollout.inference_parts
        self._keep = keep
        self._max_rounds = max_rounds
        self._greedy = greedy
        self._begin_forwards = begin_forwards
        self._curriculum = curriculum
        self._curriculum_state: Mapping[str, Any] = {}  # of an earlier process, where this one takes epochs
        self._drawn: dict[int, list[str]] = {}  # the prompts of steps that have not been trained on
        self._requested: Counter[int] = Counter()  # how many of them this process has requested

    async def sample(self, step: int) -> Sampled:
        """Samples a step and starts to score it; afterwards the trainers have the devices."""
        metrics: Mapping[str, float] = {}
        forwards: Sequence[Forwards] = ()
        scores: Mapping[str, Sequence[float]] | None = None
        greedy = None
        if self._keep is None:
            await self._parts.colocation.to_rollout()
            prompts = self._draw(step)
            rollouts, scoring, forwards = await self._generate(prompts, (), step)
        else:
            filtered = await self._filtered(self._keep, step)
            prompts = filtered.prompts
            rollouts = filtered.rollouts
            scoring = filtered.scoring
            metrics = filtered.metrics
            scores = filtered.scores
        if self._curriculum is not None:
            metrics = {**metrics, **self._curriculum.metrics(step, [prompt.prompt_id for prompt in prompts])}
        if self._greedy:
            await self._parts.colocation.to_rollout()
            greedy = await self._parts.generator.generate(greedy_requests(prompts, step=step), self._chunks).result()
        return await self.score(prompts, rollouts, greedy, metrics, scoring, forwards=forwards, scores=scores)

    async def score(
        self,
        prompts: Sequence[Prompt],
        rollouts: Rollouts,
        greedy_rollouts: Rollouts | None,
        metrics: Mapping[str, float],
        scoring: Scoring | None = None,
        greedy: Scoring | None = None,
        forwards: Sequence[Forwards] = (),
        scores: Mapping[str, Sequence[float]] | None = None,
    ) -> Sampled:
        """Starts whatever scoring has not started yet; gives the devices to the trainers."""
        await self._parts.colocation.to_training()
        if scoring is None:
            scorings = [self._score(part, prompts) for part in rollouts.parts(self._part_count)]
            scoring = self._parts.engines.spawn(_join(scorings))
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
            scores=scores,
        )

    def prompt(self, prompt_id: str) -> Prompt:
        return self._stream[prompt_id]

    def note(self, step: int, scores: Mapping[str, Sequence[float]]) -> None:
        """Takes the known scores of the prompts of a step that is trained on."""
        if self._curriculum is not None:
            self._curriculum.note(step, scores)

    def forget(self, step: int) -> None:
        """Ends the record of a step's prompts, when it was trained on."""
        self._drawn.pop(step, None)
        del self._requested[step]

    def state(self) -> dict[str, Any]:
        """Returns the position in the prompts, and those of steps that have not been trained on."""
        state: dict[str, Any] = {**self._stream.state()}
        if self._drawn:
            state["drawn"] = {str(step): prompts for step, prompts in sorted(self._drawn.items())}
        if self._curriculum is not None:
            state["curriculum"] = self._curriculum.state()
        elif self._curriculum_state:
            state["curriculum"] = self._curriculum_state
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Loads `state()`, so that steps get the same prompts; raises ValueError if these changed."""
        self._stream.load(state)
        self._drawn = {int(step): list(prompts) for step, prompts in state.get("drawn", {}).items()}
        known: Mapping[str, Any] = state.get("curriculum", {})
        if self._curriculum is None:
            self._curriculum_state = known
        elif known:
            self._curriculum.load(known)

    def _draw(self, step: int) -> list[Prompt]:
        """Returns the next prompts of a step; those that an earlier process drew come first."""
        drawn = self._drawn.setdefault(step, [])
        first = self._requested[step]
        stop = first + self._prompts_per_step
        self._requested[step] = stop
        missing = max(stop - len(drawn), 0)
        if self._curriculum is None:
            drawn += [prompt.prompt_id for prompt in self._stream.next(missing)]
        elif missing:
            drawn += self._curriculum.next(step, missing, drawn)
        return [self._stream[prompt_id] for prompt_id in drawn[first:stop]]

    async def _generate(
        self, prompts: Sequence[Prompt], earlier: Sequence[Prompt], step: int
    ) -> tuple[Rollouts, Scoring | None, Sequence[Forwards]]:
        """Samples some prompts; ids and seeds continue those of the step's earlier prompts.

        Where the trainers have devices of their own, their scores and forward passes have begun.
        """
        seed = self._config.run.seed
        requests = sample_requests([*earlier, *prompts], self._samples_per_prompt, seed=seed, step=step)
        pending = self._parts.generator.generate(requests[len(earlier) * self._samples_per_prompt :], self._chunks)
        if self._parts.colocation.shared:
            return await pending.result(), None, ()
        parts = [self._parts.engines.spawn(self._begin(part, prompts)) for part in pending.parts(self._part_count)]
        begun = [await part for part in parts]
        scoring = self._parts.engines.spawn(_join([scoring for scoring, _ in begun]))
        return await pending.result(), scoring, [forwards for _, forwards in begun]

    async def _begin(self, part: PendingRollouts, prompts: Sequence[Prompt]) -> tuple[Scoring, Forwards]:
        """Waits for a part of some samples, and starts its forward passes and scores."""
        rollouts = await part.result()
        forwards: Forwards = {}
        if self._begin_forwards is not None:
            forwards = self._begin_forwards(rollouts)
        return self._score(rollouts, prompts), forwards

    def _score(self, rollouts: Rollouts, prompts: Sequence[Prompt]) -> Scoring:
        """Starts to score rollouts."""
        by_id = {prompt.prompt_id: prompt for prompt in prompts}
        return self._parts.engines.spawn(self._parts.scorer.score(rollouts, by_id, self._config.reward.functions))

    async def _filtered(self, keep: SampleFilter, step: int) -> Sampled:
        """Returns the first draws that pass the filter."""
        wanted = self._prompts_per_step
        size = self._samples_per_prompt
        scores: dict[str, list[float]] = {}
        prompts, rounds, scorings, kept = await self._rounds(keep, step, scores)
        others = sorted(set(range(len(prompts))) - set(kept))
        chosen = sorted([*kept, *others][:wanted])
        rollouts = Rollouts.joined(rounds)
        draws = Branches.of(rollouts.samples).conversation // size
        rows: list[int] = np.flatnonzero(np.isin(draws, chosen)).tolist()
        conversations = np.isin(np.arange(len(prompts) * size) // size, chosen)
        if len(rows) < len(rollouts.samples):
            picked = [rollouts.samples[row] for row in rows]
            rollouts = await self._parts.engines.pick(rollouts, picked, self._chunks)
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
        return Sampled(
            prompts=[prompts[draw] for draw in chosen],
            rollouts=rollouts,
            scoring=known_scores(selected),
            metrics=metrics,
            scores=scores,
        )

    async def _rounds(
        self, keep: SampleFilter, step: int, scores: dict[str, list[float]]
    ) -> tuple[list[Prompt], list[Rollouts], list[ScoredSamples], list[int]]:
        """Samples rounds until enough draws pass; returns draws, samples by round, and who passed.

        Args:
            scores: gets the scores of all draws by prompt, for a curriculum.
        """
        drawn: list[Prompt] = []
        rounds: list[Rollouts] = []
        scorings: list[ScoredSamples] = []
        kept: list[int] = []
        while len(rounds) < self._max_rounds and len(kept) < self._prompts_per_step:
            await self._parts.colocation.to_rollout()
            prompts = self._draw(step)
            rollouts, scoring, _ = await self._generate(prompts, drawn, step)
            if scoring is None:
                if self._parts.scorer.model is not None:
                    await self._parts.colocation.to_training()
                scoring = self._score(rollouts, prompts)
            scored = await scoring
            rounds.append(rollouts)
            scorings.append(scored)
            whole = Branches.of(scored.samples).whole(scored.samples)
            keeps, totals = keep(scored.scores, whole)
            kept += (len(drawn) + np.flatnonzero(keeps[:: self._samples_per_prompt])).tolist()
            if self._curriculum is not None:
                for prompt_id, known in scores_by_prompt(whole, totals).items():
                    scores.setdefault(prompt_id, []).extend(known)
            drawn += prompts
        return drawn, rounds, scorings, kept


async def _join(parts: Sequence[Scoring]) -> ScoredSamples:
    """Waits for the scores of all parts."""
    return ScoredSamples.joined([await part for part in parts])


def known_scores(scored: ScoredSamples) -> Scoring:
    """Returns scores that are known."""
    scoring = asyncio.get_running_loop().create_future()
    scoring.set_result(scored)
    return scoring


def sample_metrics(samples: Sequence[SampleInfo], max_new_tokens: int) -> dict[str, float]:
    """Returns metrics of the lengths and the ends of a step's rollouts; branches count as one."""
    samples = Branches.of(samples).whole(samples)
    finished = sum(sample.finished for sample in samples) / len(samples)
    metrics: dict[str, float] = {"rollout/samples": len(samples)}
    for name in ("response", "prompt"):
        lengths = np.array([getattr(sample, f"{name}_tokens") for sample in samples])
        metrics[f"{name}_length/mean"] = float(lengths.mean())
        metrics[f"{name}_length/min"] = float(lengths.min())
        metrics[f"{name}_length/max"] = float(lengths.max())
    conversations = conversation_metrics(samples)
    if not conversations:  # of a conversation, each turn has this limit
        clipped = sum(sample.response_tokens >= max_new_tokens for sample in samples)
        metrics["response_length/clip_ratio"] = clipped / len(samples)
    return {**metrics, "truncated_fraction": 1 - finished, "stop_token_fraction": finished, **conversations}


def conversation_metrics(samples: Sequence[SampleInfo]) -> dict[str, float]:
    """Returns metrics of conversations with an environment, `environment/*`; none without one.

    Those of the environment itself are means over the conversations that have them.
    """
    outcomes = {sample.conversation: sample.outcome for sample in samples}
    held = [outcome for outcome in outcomes.values() if outcome is not None]
    if not held:
        return {}
    environment_values: dict[str, list[float]] = defaultdict(list)
    for outcome in held:
        for name, value in outcome.metrics.items():
            environment_values[name].append(value)
    metrics = {f"environment/{name}": float(np.mean(values)) for name, values in environment_values.items()}
    turns = [outcome.turns for outcome in held]
    metrics["environment/turns/mean"] = float(np.mean(turns))
    metrics["environment/turns/max"] = max(turns)
    metrics["environment/failed"] = sum(outcome.failure is not None for outcome in held)
    metrics["environment/truncated"] = sum(outcome.truncated for outcome in held) / len(held)
    for limit, count in Counter(outcome.limit for outcome in held if outcome.limit is not None).items():
        metrics[f"environment/truncated/{limit}"] = count / len(held)
    return metrics
