"""From prompts to rollouts with their scores: what a step learns from.

A step has ``data.prompts_per_step`` draws: a prompt with its ``samples_per_prompt`` responses each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from megarl.cluster.engines import RolloutGroup, Rollouts
from megarl.config import PPOConfig, RAFTConfig
from megarl.data.prompts import greedy_requests, sample_requests
from megarl.data.stream import Stream, StreamState
from megarl.loop.colocation import Turns
from megarl.loop.scoring import Scorer, Scoring, Sources
from megarl.types import Prompt, SampleInfo

Keep = Callable[[Sources, Sequence[SampleInfo]], npt.NDArray[np.bool_]]
"""Which samples of a round, [N], are of a prompt that says something."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """The rollouts of a step.

    Args:
        prompts: one per draw.
        rollouts: in the order of the draws.
        scoring: of the rollouts.
        greedy: of the likeliest response to each different prompt, which is not trained on; None where nobody asks.
        metrics: of what was left out.
    """

    prompts: Sequence[Prompt]
    rollouts: Rollouts
    scoring: Scoring
    greedy: Scoring | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, kw_only=True)
class DynamicSampling:
    """Draws that say nothing are left out, and further prompts are answered until the step is full.

    Args:
        keep: which samples of a round are kept; it decides by prompt.
        rounds: of generation, at most. A step that is not full then takes the first of those that were left out.
    """

    keep: Keep
    rounds: int


class Sampler:
    """Answers and scores the prompts of one step after the other.

    Args:
        config: of the run.
        prompts: of the run.
        engines: that answer.
        scorer: of the responses.
        turns: of trainers and engines.
        chunks: into which the samples of a step are divided, at most.
        dynamic: which prompts a step is made of; None: the next ones.
        greedy: answer each prompt of a step with its likeliest response as well.
    """

    def __init__(
        self,
        config: PPOConfig | RAFTConfig,
        prompts: Sequence[Prompt],
        engines: RolloutGroup,
        scorer: Scorer,
        turns: Turns,
        chunks: int,
        *,
        dynamic: DynamicSampling | None = None,
        greedy: bool = False,
    ) -> None:
        self._stream = Stream(prompts, config.run.seed)
        self._engines, self._scorer, self._turns = engines, scorer, turns
        self._functions = config.reward.functions
        self._prompts_per_step, self._samples_per_prompt = config.data.prompts_per_step, config.data.samples_per_prompt
        self._seed, self._chunks = config.run.seed, chunks
        self._dynamic, self._greedy = dynamic, greedy

    def next(self, step: int, version: int) -> Sampled:
        """The rollouts of a step, and their scores in the making; the turn is the engines', and then the trainers'.

        Args:
            step: of the run.
            version: of the engines' weights: that of the last sync.
        """
        metrics: Mapping[str, float] = {}
        if self._dynamic is None:
            prompts, scoring = self._stream.next(self._prompts_per_step), None
            rollouts = self._answers(prompts, (), step)
        else:
            prompts, rollouts, scoring, metrics = self._selected(self._dynamic, step, version)
        likeliest = None
        if self._greedy:
            self._turns.back_to_engines(version)
            likeliest = self._engines.generate(greedy_requests(prompts, step=step), self._chunks)
        self._turns.to_trainers()
        return Sampled(
            prompts=prompts,
            rollouts=rollouts,
            scoring=self._scoring(rollouts, prompts) if scoring is None else scoring,
            greedy=None if likeliest is None else self._scoring(likeliest, prompts),
            metrics=metrics,
        )

    def state(self) -> dict[str, Any]:
        """Where the prompts stand, as JSON."""
        return asdict(self._stream.state())

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from there.

        Raises:
            ValueError: the prompts are not those of the saved state.
        """
        self._stream.load(StreamState(**state))

    def _answers(self, prompts: Sequence[Prompt], earlier: Sequence[Prompt], step: int) -> Rollouts:
        """The samples of some prompts; ids and seeds go on from those of the step's earlier ones."""
        requests = sample_requests([*earlier, *prompts], self._samples_per_prompt, seed=self._seed, step=step)
        return self._engines.generate(requests[len(earlier) * self._samples_per_prompt :], self._chunks)

    def _scoring(self, rollouts: Rollouts, prompts: Sequence[Prompt]) -> Scoring:
        return self._scorer.submit(rollouts, {prompt.prompt_id: prompt for prompt in prompts}, self._functions)

    def _selected(
        self, dynamic: DynamicSampling, step: int, version: int
    ) -> tuple[list[Prompt], Rollouts, Scoring, Mapping[str, float]]:
        """The draws that make a step; what is too much goes by the order of the prompts."""
        wanted, size = self._prompts_per_step, self._samples_per_prompt
        rounds, kept = self._rounds(dynamic, step, version)
        prompts = [prompt for own in rounds for prompt in own.prompts]
        chosen = _filled(kept, len(prompts), wanted)
        rows = [draw * size + sample for draw in chosen for sample in range(size)]
        answered = Rollouts.joined([own.rollouts for own in rounds])
        if len(rows) < len(answered.samples):
            answered = self._engines.pick(answered, [answered.samples[row] for row in rows], self._chunks)
        metrics = {
            "filter/rounds": len(rounds),
            "filter/groups": len(prompts),
            "filter/groups_kept": len(kept) / len(prompts),
            "filter/filled": max(wanted - len(kept), 0),
        }
        return [prompts[draw] for draw in chosen], answered, _joined_scores(rounds, rows), metrics

    def _rounds(self, dynamic: DynamicSampling, step: int, version: int) -> tuple[list[_Round], list[int]]:
        """Rounds until enough draws are kept, and which these are, numbered over the rounds."""
        rounds: list[_Round] = []
        drawn: list[Prompt] = []
        kept: list[int] = []
        while len(rounds) < dynamic.rounds and len(kept) < self._prompts_per_step:
            self._turns.back_to_engines(version)
            prompts = self._stream.next(self._prompts_per_step)
            rollouts = self._answers(prompts, drawn, step)
            if self._scorer.model is not None:
                self._turns.to_trainers()
            scoring = self._scoring(rollouts, prompts)
            rounds.append(_Round(prompts=prompts, rollouts=rollouts, scoring=scoring, sources=scoring.wait()))
            keeps = dynamic.keep(rounds[-1].sources, scoring.samples)[:: self._samples_per_prompt]
            kept += (len(drawn) + np.flatnonzero(keeps)).tolist()
            drawn += prompts
        return rounds, kept


@dataclass(frozen=True, kw_only=True)
class _Round:
    """The draws of one round of generation, and their scores."""

    prompts: Sequence[Prompt]
    rollouts: Rollouts
    scoring: Scoring
    sources: Sources


def _joined_scores(rounds: Sequence[_Round], rows: Sequence[int]) -> Scoring:
    """The scores, which are there, of some samples, numbered over the rounds."""
    samples = [sample for own in rounds for sample in own.scoring.samples]
    scores = {name: np.concatenate([own.sources[name] for own in rounds])[rows] for name in rounds[0].sources}
    seconds = sum(own.scoring.seconds() for own in rounds)
    return Scoring(samples=[samples[row] for row in rows], wait=lambda: scores, seconds=lambda: seconds)


def _filled(kept: Sequence[int], drawn: int, wanted: int) -> list[int]:
    """The first draws that are kept, and where they are too few the first of the others; in order."""
    others = sorted(set(range(drawn)) - set(kept))
    return sorted([*kept, *others][:wanted])


def sample_metrics(samples: Sequence[SampleInfo], max_new_tokens: int) -> dict[str, float]:
    """What lengths and ends say of a step's rollouts.

    Args:
        max_new_tokens: the length limit of a response.
    """
    finished = float(np.mean([sample.finished for sample in samples]))
    lengths = {
        "response_length": np.array([sample.response_tokens for sample in samples]),
        "prompt_length": np.array([sample.prompt_tokens for sample in samples]),
    }
    spreads = {
        f"{name}/{kind}": float(getattr(of_samples, kind)())
        for name, of_samples in lengths.items()
        for kind in ("mean", "min", "max")
    }
    return {
        "rollout/samples": len(samples),
        **spreads,
        "response_length/clip_ratio": float(np.mean(lengths["response_length"] >= max_new_tokens)),
        "truncated_fraction": 1 - finished,
        "stop_token_fraction": finished,
    }
