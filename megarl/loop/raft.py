"""Reward-ranked fine-tuning (Dong et al., 2023): maximizes the likelihood of the actor's best responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from megarl.algos.registry import SELECTIONS, bound
from megarl.cluster.calls import rank0_result
from megarl.cluster.session import Session
from megarl.config import RAFTConfig
from megarl.config.schema import RAFTSettings
from megarl.data.batches import on_all_tokens
from megarl.data.schedule import update_schedules
from megarl.groups.rollouts import Rollouts
from megarl.loop.rollout_trainer import RolloutTrainer
from megarl.loop.sampler import Sampled, Sampler
from megarl.loop.scoring import Branches, Values, known_means, score_metrics, total_scores
from megarl.megatron.worker import MegatronWorker
from megarl.megatron.worker_requests import UpdateRequest
from megarl.preflight.datasets import PromptSets
from megarl.run.results import StepResult
from megarl.run.timers import Timers
from megarl.types import SampleInfo


class RAFTTrainer(RolloutTrainer[RAFTConfig]):
    """A step samples, scores, selects samples, updates the actor on their likelihood, and syncs the weights."""

    def __init__(
        self, config: RAFTConfig, session: Session, model_dir: str, data: PromptSets, phase: Callable[[str], None]
    ) -> None:
        super().__init__(config, session, model_dir, data, phase, config.scores.truncate_at)
        chunks = self._trainers.chunks(config.rollout.inference_parts)
        self._buffer = self._make_buffer(Sampler(config, data.train, self._parts, chunks))

    def step(self, step: int) -> StepResult:
        """Takes a step; afterwards the engines have version `step` where a sync is due."""
        config, timers = self._config, Timers(self._phase)
        with timers("step"):
            with timers("rollout"):
                sampled = self._buffer.take(step)
            samples, scored = sampled.rollouts.samples, sampled.scoring.samples
            with timers("reward"):
                branches = Branches.of(samples)
                whole = branches.whole(scored)
                by_reward = {name: values[branches.last] for name, values in sampled.scoring.wait().items()}
                scores = total_scores(by_reward, whole, self._weights, config.scores)
                order = self._score_order(samples, step)
                scores = scores if order is None else scores[order]
            chosen = select_samples(scores, whole, config.raft, config.data.samples_per_prompt)
            with timers("update"):
                rows: list[int] = [row for index in chosen for row in branches.rows(index)]
                trained = [samples[row] for row in rows]
                updates = self._update(trained, sampled, step)
            with timers("sync"):
                transfer = self._sync(step)
        metrics = {
            **known_means({"objective/score": scores, "raft/selected_score": scores[chosen]}),
            **score_metrics(by_reward),
            "raft/selected": len(chosen),
        }
        if staleness := config.rollout.max_staleness:
            metrics |= age_metrics(sampled.rollouts, step - 1, oldest=staleness)
        shown = {name: values[branches.conversation] for name, values in by_reward.items()}
        of_samples = scores[branches.conversation]
        return self._result(step, sampled, of_samples, shown, updates, metrics, {**transfer, **timers.take()})

    def _update(self, chosen: Sequence[SampleInfo], sampled: Sampled, step: int) -> list[dict[str, float]]:
        """Takes the optimizer steps, at most one per sample and epoch, and skips the remaining configured ones."""
        raft, actor = self._config.raft, self.roles["actor"]
        mini_batches = min(raft.mini_batches, len({sample.conversation for sample in chosen}))
        updates: list[dict[str, float]] = []
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
            request = UpdateRequest(schedules=schedules, chunks=sampled.rollouts.chunks)
            call = actor.dispatch(MegatronWorker.update, request)
            updates = rank0_result(call)
            self._meter.add_update("actor", schedules, call.longest())
        skipped = raft.epochs * (raft.mini_batches - mini_batches)
        if skipped:
            actor.call(MegatronWorker.skip_steps, skipped).wait()
        return updates


def age_metrics(rollouts: Rollouts, version: int, *, oldest: int) -> dict[str, float]:
    """Returns how much older than the actor, of `version`, the weights were that sampled, as the metrics of PPO do."""
    numbers = range(len(rollouts.chunks))
    chunks = rollouts.chunks.only(numbers)
    responses = [spans for chunk in numbers for spans in chunks[chunk].versions]
    spans = [span for of_response in responses for span in of_response]
    if not spans:
        return {}
    ages = np.repeat([version - span.version for span in spans], [span.stop - span.start for span in spans])
    return {
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
        **{f"staleness/age_{age}": float((ages == age).mean()) for age in range(oldest + 1)},
        "rollout/version_spans": len(spans) / len(responses),
    }


def select_samples(
    scores: Values, samples: Sequence[SampleInfo], raft: RAFTSettings, samples_per_prompt: int
) -> npt.NDArray[np.int64]:
    """Returns the indices of the samples to train on.

    Args:
        scores: [N]; samples without a score are not selected.
        samples: [N], adjacent for each draw.
    """
    discarded = ~np.isfinite(scores)
    if raft.discard_unfinished:
        discarded |= ~np.array([sample.finished for sample in samples])
    if raft.min_score is not None:
        discarded |= ~(scores >= raft.min_score)
    draws = torch.arange(len(scores)) // samples_per_prompt
    select = bound(SELECTIONS, raft.strategy.name, raft.strategy.options)
    return select(torch.as_tensor(scores), draws, torch.as_tensor(discarded)).numpy()
