"""Training of a reward model on preferences, and the scale of its scores.

The scale gives the scores of reference samples, which are responses of the initial model, mean 0
and variance 1: after training, and optionally before (Ziegler et al., "Fine-tuning language models
from human preferences", 2019). Before training, the gain goes into the head; the bias has no effect
on comparisons. After training, both are written beside the model, whose raw scores do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megarl.algos.reward_shaping import ScoreScale, score_scale
from megarl.cluster.calls import gather_by_chunk
from megarl.cluster.ray_worker import ChunkRefs
from megarl.cluster.session import Session
from megarl.data.batches import text_batch
from megarl.data.packing import TokenChunk
from megarl.data.prompts import sample_requests
from megarl.data.schedule import inference_schedule
from megarl.data.stream import Stream
from megarl.errors import RunError
from megarl.experience.padded_batch import Selectable
from megarl.groups.colocation import Colocation
from megarl.groups.engines import RolloutGroup, launch_engines
from megarl.groups.rollouts import Rollouts
from megarl.groups.trainers import close_all, start_all
from megarl.loop.scoring import Values, gather_rows
from megarl.loop.supervised import SupervisedTrainer
from megarl.megatron.worker import MegatronWorker
from megarl.megatron.worker_requests import ForwardRequest
from megarl.preflight.datasets import Sets
from megarl.preflight.memory_plan import besides_cache
from megarl.rewards.model_files import write_scale, write_statistics
from megarl.run.sinks import Metrics
from megarl.stages.reward_model.config import RewardModelConfig
from megarl.types import SampleInfo, TextChunk


class RewardModelTrainer(SupervisedTrainer):
    """Trains the role reward."""

    def __init__(
        self, config: RewardModelConfig, session: Session, model_dir: str, data: Sets, phase: Callable[[str], None]
    ) -> None:
        super().__init__(config, session, model_dir, data, phase, evaluate_every=config.data.evaluate_every)
        self._preferences = data.rows.get("data.evaluation")
        self._reference_prompts = data.rows.get("normalisation.prompts", ())
        self._normalisation = config.normalisation
        self._responses: Rollouts | None = None  # of the initial model
        self._engines: RolloutGroup | None = None
        self._sleep = config.rollout is not None and config.rollout.sleep
        if config.rollout is not None:
            besides = besides_cache(config)
            self._engines = launch_engines(
                config, config.rollout, session, model_dir, weights="files", besides_cache=besides
            )

    async def start(self) -> None:
        """Starts the trainers, and the engines with the initial model."""
        await start_all(self._trainers, self._engines, (), self._model_dir, sleep=self._sleep)

    async def begin(self, step: int) -> Metrics:
        """Scales the head before the first step, if configured."""
        if step > 0 or self._normalisation is None or not self._normalisation.before:
            return {}
        scale = await self._reference_scale()
        await self._role.call(MegatronWorker.scale_head, scale.gain)
        return {"normalisation/before_mean": scale.mean, "normalisation/before_std": scale.std}

    async def finish(self, export: Path) -> Metrics:
        """Exports the reward model, the scale of its scores and their statistics on the held-out preferences."""
        await super().finish(export)
        metrics: dict[str, float] = {}
        if self._preferences is not None:
            self._phase("statistics")
            samples, chunks = text_batch(self._preferences, self._layout.dp)
            scores = await self._scores(samples, ChunkRefs[TextChunk].put(chunks))
            metrics |= write_statistics(scores.reshape(len(self._preferences), -1), export)
        if self._normalisation is not None:
            scale = await self._reference_scale()
            write_scale(scale, export)
            metrics |= {"normalisation/mean": scale.mean, "normalisation/std": scale.std}
        return metrics

    async def _scores(self, samples: Sequence[SampleInfo], chunks: Selectable[TokenChunk]) -> Values:
        """Returns the scores of samples, [N]."""
        schedule = inference_schedule(samples, self._layout, self._budget)
        request = ForwardRequest(schedule=schedule, chunks=chunks)
        return gather_rows(await gather_by_chunk(self._role.dispatch(MegatronWorker.scores, request)))

    async def _reference_scale(self) -> ScoreScale:
        """Returns the scale that gives the scores of the reference samples the configured mean and deviation."""
        settings = self._normalisation
        rollouts = await self._reference_samples()
        assert settings is not None
        scores = torch.as_tensor(await self._scores(rollouts.samples, rollouts.chunks))
        try:
            return score_scale(scores, target_mean=settings.mean, target_std=settings.std, ddof=settings.ddof)
        except ValueError as error:
            raise RunError(f"normalisation: {error}") from error

    async def _reference_samples(self) -> Rollouts:
        """Returns responses of the initial model, which do not depend on when they are generated."""
        if self._responses is not None:
            return self._responses
        assert self._engines is not None
        assert self._normalisation is not None
        self._phase("reference samples")
        seed = self._config.run.seed
        prompts = Stream(self._reference_prompts, seed).next(self._normalisation.samples)
        requests = sample_requests(prompts, 1, seed=seed, step=0)
        colocation = Colocation(self._trainers, self._engines, None, sleep=self._sleep)
        await colocation.to_rollout()
        self._responses = await self._engines.generate(requests, self._trainers.chunks()).result()
        await colocation.to_training()
        return self._responses

    async def close(self) -> None:
        """Lets every process end by itself."""
        await close_all(self._trainers, self._engines)
