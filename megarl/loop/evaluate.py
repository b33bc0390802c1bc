"""Held-out prompts, answered and scored: means with their intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from megarl.cluster.rollouts import RolloutGroup
from megarl.config import PPOConfig
from megarl.data.prompts import sample_requests
from megarl.data.tokenizer import Tokenizer
from megarl.loop.samples import shown_samples
from megarl.loop.schedules import StepPlan
from megarl.loop.scoring import REWARD_MODEL, Scorer
from megarl.loop.stage import EvaluationResult
from megarl.types import Prompt

_NORMAL_975 = 1.959963984540054
"""Quantile of the normal distribution: this many standard errors to each side hold 95%."""


class Evaluator:
    """Answers the same prompts with the same seeds every time, so that two evaluations differ by the weights alone.

    Args:
        config: of the run.
        prompts: held out.
        engines: that answer.
        scorer: of the responses.
        tokenizer: for samples to read.
        chunks: into which the samples are divided.
    """

    def __init__(
        self,
        config: PPOConfig,
        prompts: Sequence[Prompt],
        engines: RolloutGroup,
        scorer: Scorer,
        tokenizer: Tokenizer | None,
        chunks: int,
    ) -> None:
        assert config.evaluation is not None
        self._config, self._engines, self._scorer, self._tokenizer = config, engines, scorer, tokenizer
        self._prompts = {prompt.prompt_id: prompt for prompt in prompts}
        self._requests = sample_requests(prompts, config.evaluation.samples_per_prompt, seed=config.run.seed, step=0)
        self._functions, self._chunks = config.evaluation.functions, chunks

    def evaluate(self, step: int, to_trainers: Callable[[], None]) -> EvaluationResult:
        """Generates with the weights that the engines have, and scores.

        Args:
            step: after which it is.
            to_trainers: called when the engines have answered.
        """
        rollouts = self._engines.generate(self._requests, self._chunks)
        to_trainers()
        plan = StepPlan(self._config, rollouts.samples, step)
        schedule = plan.inference("reward") if self._scorer.model is not None else None
        scores = self._scorer.submit(rollouts, self._prompts, schedule, self._functions).wait()
        total = scores.get(REWARD_MODEL, next(iter(scores.values())))
        named = {"score" if name == REWARD_MODEL else name: values for name, values in scores.items()}
        lengths = np.array([sample.response_tokens for sample in rollouts.samples], dtype=np.float32)
        finished = np.array([sample.finished for sample in rollouts.samples], dtype=np.float32)
        columns = {**named, "response_tokens": lengths, "finished": finished}
        return EvaluationResult(
            step=step,
            metrics={"eval/samples": len(rollouts.samples), **means_with_intervals(columns)},
            samples=shown_samples(rollouts, total, scores, self._tokenizer, self._config.tracking.samples),
        )


def means_with_intervals(columns: Mapping[str, npt.NDArray[np.float32]]) -> dict[str, float]:
    """``eval/NAME``, the mean of [N] values, and ``eval/NAME_ci95``, the half width of its 95% interval.

    The interval is normal, from the sample standard deviation; that of one sample is not known (NaN).
    """
    metrics: dict[str, float] = {}
    for name, values in columns.items():
        count = len(values)
        deviation = float(values.std(ddof=1, dtype=np.float64)) if count > 1 else math.nan
        metrics[f"eval/{name}"] = float(values.mean(dtype=np.float64))
        metrics[f"eval/{name}_ci95"] = _NORMAL_975 * deviation / math.sqrt(count)
    return metrics
