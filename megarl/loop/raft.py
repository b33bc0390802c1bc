"""Reward-ranked fine-tuning (Dong et al., 2023): the likelihood of the best of the actor's own responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megarl.algos.registry import SELECTIONS, bound
from megarl.cluster.session import Session
from megarl.cluster.trainers import reported
from megarl.config import RAFTConfig
from megarl.config.schema import RAFTSettings
from megarl.data.batches import on_all_tokens
from megarl.data.schedule import update_schedules
from megarl.loop.rollout_trainer import Online
from megarl.loop.sampler import Sampled, Sampler, sample_metrics
from megarl.loop.scoring import Sources, Values, known_means, permutation_seed, total_scores, unscored_metrics
from megarl.preflight.datasets import PromptSets
from megarl.run.directory import RunDirectory
from megarl.run.results import StepResult
from megarl.run.samples import shown_samples
from megarl.run.timers import Timers
from megarl.types import SampleInfo


class RewardRanked(Online[RAFTConfig]):
    """A run of RAFT: rollouts, scores, a selection, its likelihood, and the weights back into the engines.

    Args:
        config: of the run.
        session: where everything runs.
        directory: of the run.
        data: the prompts, and the tokenizer.
        phase: is told what the run does.
    """

    def __init__(
        self,
        config: RAFTConfig,
        session: Session,
        directory: RunDirectory,
        data: PromptSets,
        phase: Callable[[str], None],
    ) -> None:
        super().__init__(config, session, directory, data, phase, config.scores.truncate_at)
        chunks = self.trainers.chunks
        self._sampler = Sampler(config, data.train, self._engines, self._scorer, self._turns, chunks)

    def step(self, step: int) -> StepResult:
        """One iteration: rollouts, a selection, its likelihood, and where it is due version ``step`` in the engines."""
        config = self._config
        timers = Timers(self._phase)
        with timers("step"):
            with timers("sync"):
                self._turns.back_to_engines(self._version)  # after an evaluation or a checkpoint
            with timers("rollout"):
                sampled = self._sampler.next(step, self._version)
            samples = sampled.rollouts.samples
            with timers("reward"):
                sources = sampled.scoring.wait()
                scores = self._scores(sources, sampled.scoring.samples, step)
            chosen = selected(scores, sampled.scoring.samples, config.raft, config.data.samples_per_prompt)
            with timers("update"):
                updates = self._update([samples[index] for index in chosen], sampled, step)
            with timers("sync"):
                transfer = self._sync(step)
        seconds = timers.take()
        tokens = sum(sample.tokens for sample in samples)
        metrics = {
            "version": step,
            **known_means({"objective/score": scores, "raft/selected_score": scores[chosen]}),
            **known_means({f"scores/{name}": values for name, values in sources.items()}),
            **unscored_metrics(sources),
            "raft/selected": len(chosen),
            **sample_metrics(samples, config.rollout.max_new_tokens),
            "update/steps": len(updates),
            **transfer,
            **seconds,
            "perf/tokens_per_second": tokens / seconds["time/step"],
        }
        shown = shown_samples(sampled.rollouts, scores, sources, self._tokenizer, config.tracking.samples)
        return StepResult(step=step, metrics=metrics, updates=updates, samples=shown)

    def _scores(self, sources: Sources, samples: Sequence[SampleInfo], step: int) -> Values:
        """[N], what the selection sees."""
        reward = self._config.reward
        scores = total_scores(sources, samples, reward, self._config.scores)
        if reward.shuffle:
            seed = torch.Generator().manual_seed(permutation_seed(self._config.run.seed, step))
            scores = scores[torch.randperm(len(scores), generator=seed).numpy()]
        return scores

    def _update(self, chosen: Sequence[SampleInfo], sampled: Sampled, step: int) -> list[dict[str, float]]:
        """The optimizer steps on the selected samples: as many as there are samples, where these are too few.

        Steps that are not taken count in the course of the learning rate.
        """
        raft, actor = self._config.raft, self._roles["actor"]
        mini_batches = min(raft.mini_batches, len(chosen))
        told: list[dict[str, float]] = []
        if mini_batches:
            schedules = update_schedules(
                on_all_tokens(chosen) if raft.loss_on == "all" else chosen,
                self._config.layout("actor"),
                self._config.role("actor").tokens_per_micro_batch,
                mini_batches=mini_batches,
                epochs=raft.epochs,
                seed=self._config.run.seed,
                step=step,
            )
            told = reported(actor.update(schedules, sampled.rollouts.chunks))
        left = raft.epochs * (raft.mini_batches - mini_batches)
        if left:
            actor.forgo(left).wait()
        return told

    def state(self) -> dict[str, Any]:
        """Where the prompts stand."""
        return {"prompts": self._sampler.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        self._sampler.load(state["prompts"])


def selected(
    scores: Values, samples: Sequence[SampleInfo], raft: RAFTSettings, samples_per_prompt: int
) -> npt.NDArray[np.int64]:
    """Which samples are learnt, as indices.

    Args:
        scores: [N], not a number where there is none: such a sample is never learnt.
        samples: as they were scored, those of a draw next to each other.
        raft: of the configuration.
        samples_per_prompt: samples of a draw.
    """
    discarded = ~np.isfinite(scores)
    if raft.discard_unfinished:
        discarded |= ~np.array([sample.finished for sample in samples])
    if raft.min_score is not None:
        discarded |= ~(scores >= raft.min_score)
    draws = torch.arange(len(scores)) // samples_per_prompt
    select = bound(SELECTIONS, raft.strategy.name, raft.strategy.options)
    return select(torch.from_numpy(scores), draws, torch.from_numpy(discarded)).numpy()
