"""Training of a reward model on preferences, and the scale of its scores.

The scale gives the scores of reference samples, which are responses of the initial model, mean 0 and variance 1 after
the training, and optionally before it too (Ziegler et al., "Fine-tuning language models from human preferences", 2019).
Before it, the gain goes into the head, and the bias has no effect on a comparison of two responses. After it, both are
written beside the model, whose raw scores stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import torch

from megarl.algos.reward_shaping import ScoreScale, score_scale
from megarl.cluster.calls import gather_by_chunk
from megarl.cluster.engines import RolloutGroup, Rollouts, launch_engines
from megarl.cluster.session import Session
from megarl.cluster.trainers import start_all
from megarl.config import RewardModelConfig
from megarl.data.batches import text_batch
from megarl.data.prompts import sample_requests
from megarl.data.schedule import inference_schedule
from megarl.data.stream import Stream
from megarl.errors import RunError
from megarl.loop.colocation import Colocation
from megarl.loop.scoring import gather_rows
from megarl.loop.supervised import SupervisedTrainer, Task
from megarl.megatron.worker import MegatronWorker
from megarl.megatron.worker_requests import ForwardRequest
from megarl.preflight.datasets import PairSets
from megarl.rewards.model_files import PreferenceStatistics, write_scale
from megarl.rollout.engine import RolloutEngine
from megarl.run.directory import RunDirectory
from megarl.run.sinks import Metrics


class RewardModelTrainer(SupervisedTrainer):
    """Trains the role reward."""

    def __init__(
        self,
        config: RewardModelConfig,
        session: Session,
        directory: RunDirectory,
        data: PairSets,
        phase: Callable[[str], None],
    ) -> None:
        super().__init__(
            config,
            session,
            directory,
            phase,
            Task(
                role="reward",
                train=data.train,
                held_out=data.held_out,
                rows_per_step=config.data.pairs_per_step,
                sequences_per_row=len(data.train[0].responses),
            ),
        )
        self._preferences, self._reference_prompts = data.held_out, data.reference
        self._normalisation = config.normalisation
        self._engines: RolloutGroup | None = None
        self._sleep = config.rollout is not None and config.rollout.sleep
        if config.rollout is not None:
            self._engines = launch_engines(config, config.rollout, session, self._model_dir, weights="files")

    def start(self) -> None:
        """Starts the trainers, and the engines with the initial model."""
        start_all(self._trainers, self._engines, None, self._model_dir, sleep=self._sleep)

    def begin(self, step: int) -> Metrics:
        """Scales the head before the first step, if the configuration asks for that."""
        if step > 0 or self._normalisation is None or not self._normalisation.before:
            return {}
        scale = self._reference_scale()
        self._role.call(MegatronWorker.scale_head, scale.gain).wait()
        return {"normalisation/before_mean": scale.mean, "normalisation/before_std": scale.std}

    def finish(self, export: Path) -> Metrics:
        """Writes the reward model, the scale of its scores and their statistics on the held-out preferences."""
        super().finish(export)
        metrics: dict[str, float] = {}
        if self._preferences is not None:
            statistics = self._statistics()
            statistics.write(export)
            metrics |= statistics.metrics()
        if self._normalisation is not None:
            scale = self._reference_scale()
            write_scale(scale, export)
            metrics |= {"normalisation/mean": scale.mean, "normalisation/std": scale.std}
        return metrics

    def _statistics(self) -> PreferenceStatistics:
        """Scores the held-out preferences."""
        assert self._preferences is not None
        self._phase("statistics")
        samples, chunks = text_batch(self._preferences, self._layout.dp)
        schedule = inference_schedule(samples, self._layout, self._budget)
        request = ForwardRequest(schedule=schedule, chunks=self._session.share(chunks))
        scores = gather_rows(gather_by_chunk(self._role.dispatch(MegatronWorker.scores, request)))
        return PreferenceStatistics.of(scores.reshape(len(self._preferences), -1))

    def _reference_scale(self) -> ScoreScale:
        """The scale that gives the scores of the reference samples the mean and deviation of the configuration."""
        settings, rollouts = self._normalisation, self._reference_samples
        assert settings is not None
        schedule = inference_schedule(rollouts.samples, self._layout, self._budget)
        request = ForwardRequest(schedule=schedule, chunks=rollouts.chunks)
        scores = gather_rows(gather_by_chunk(self._role.dispatch(MegatronWorker.scores, request)))
        try:
            return score_scale(
                torch.as_tensor(scores), target_mean=settings.mean, target_std=settings.std, ddof=settings.ddof
            )
        except ValueError as error:
            raise RunError(f"normalisation: {error}") from error

    @cached_property
    def _reference_samples(self) -> Rollouts:
        """Responses of the initial model; the same whenever they are generated."""
        assert self._engines is not None
        assert self._normalisation is not None
        self._phase("reference samples")
        seed = self._config.run.seed
        prompts = Stream(self._reference_prompts, seed).next(self._normalisation.samples)
        requests = sample_requests(prompts, 1, seed=seed, step=0)
        colocation = Colocation(self._trainers, self._engines, None, sleep=self._sleep)
        colocation.to_rollout()
        rollouts = self._engines.generate(requests, self._trainers.chunks)
        colocation.to_training()
        return rollouts

    def close(self) -> None:
        """Lets every process end by itself."""
        engines = self._engines and self._engines.call(RolloutEngine.close)
        super().close()
        if engines is not None:
            engines.wait()
