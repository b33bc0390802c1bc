"""Training of a reward model on preference pairs (Bradley and Terry, 1952), and the scale of its scores.

The scale is that of reference samples: responses of the model as it was before, whose scores get mean 0 and variance 1
(Ziegler et al., "Fine-tuning language models from human preferences", 2019).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megarl.cluster.group import merged
from megarl.cluster.rollouts import RolloutGroup
from megarl.cluster.session import Session
from megarl.config import RewardModelConfig
from megarl.data.prompts import sample_requests
from megarl.data.schedule import inference_schedule
from megarl.data.streams import Stream
from megarl.errors import RunError
from megarl.loop.datasets import PairSets
from megarl.loop.directory import RunDirectory
from megarl.loop.scoring import Scale, in_order
from megarl.loop.setup import launch_engines
from megarl.loop.stage import Metrics
from megarl.loop.supervised import Supervised


class RewardModel(Supervised):
    """A run that trains the role reward.

    Args:
        config: of the run.
        session: where everything runs.
        directory: of the run.
        data: the pairs, and the prompts of the reference samples.
        phase: is told what the run does.
    """

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
            role="reward",
            train=data.train,
            held_out=data.held_out,
            per_step=config.data.pairs_per_step,
            sequences_per_row=2,
        )
        self._normalisation, self._reference_prompts = config.normalisation, data.reference
        self._engines: RolloutGroup | None = None
        self._engines_sleep = config.rollout is not None and config.rollout.sleep
        if config.rollout is not None:
            self._engines = launch_engines(config, config.rollout, session, self._model_dir, weights="files")

    def start(self) -> None:
        """Starts the trainers, and the engines with the model as it is."""
        engines = self._engines and self._engines.start()
        if engines is not None and self._engines_sleep:
            engines.wait()  # asleep: starting both at once, the devices would have to hold both
        super().start()
        if engines is not None:
            engines.wait()

    def finish(self, export: Path) -> Metrics:
        """Writes the reward model, with the scale of its scores."""
        super().finish(export)
        scale = self._reference_scale()
        if scale is None:
            return {}
        scale.write(export)
        return {"normalisation/mean": scale.mean, "normalisation/std": scale.std}

    def _reference_scale(self) -> Scale | None:
        """Mean and standard deviation of the scores of reference samples."""
        if self._engines is None or self._normalisation is None:
            return None
        self._phase("reference samples")
        prompts = Stream(self._reference_prompts, self._config.run.seed).next(self._normalisation.samples)
        requests = sample_requests(prompts, 1, seed=self._config.run.seed, step=0)
        self.trainers.rest()
        self._engines.wake_weights()
        self._engines.wake_cache()
        rollouts = self._engines.generate(requests, self.trainers.chunks)
        self._engines.sleep()
        schedule = inference_schedule(rollouts.samples, self._layout, self._budget)
        scores = in_order(merged(self._role.scores(schedule, rollouts.chunks)), rollouts.samples)
        try:
            return Scale.of(scores)
        except ValueError as error:
            raise RunError(f"normalisation: {error}") from error

    def close(self) -> None:
        """Lets every process end by itself."""
        engines = self._engines and self._engines.close()
        super().close()
        if engines is not None:
            engines.wait()
