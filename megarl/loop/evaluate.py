"""Evaluation on held-out prompts, within a training run or of a Hugging Face directory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from megarl.algos.metrics import clustered_mean, pass_rate
from megarl.config import SamplingConfig
from megarl.config.schema import Evaluation
from megarl.data.branches import Branches
from megarl.data.prompts import sample_requests
from megarl.loop.sampler import RolloutParts, conversation_metrics
from megarl.loop.scoring import REWARD_MODEL, ScoresByReward, Values, group_numbers, unscored_metrics
from megarl.preflight.datasets import Sets
from megarl.run.results import EvaluationResult, no_columns, prompt_scores, shown_samples
from megarl.run.verdict import STANDARD_ERRORS
from megarl.types import SampleInfo


class Evaluator:
    """Samples the same prompts with the same seeds, so that evaluations differ by the weights only.

    Args:
        chunks: maximum number of chunks of the samples.
    """

    def __init__(self, config: SamplingConfig, data: Sets, parts: RolloutParts, chunks: int) -> None:
        assert config.evaluation is not None
        self._evaluation = evaluation = config.evaluation
        self._parts = parts
        self._chunks = chunks
        self._tokenizer = data.tokenizer
        self._tracking = config.tracking
        prompts = data.rows["evaluation.prompts"]
        self._prompts = {prompt.prompt_id: prompt for prompt in prompts}
        temperature = 0.0 if evaluation.greedy else evaluation.temperature
        self._requests = sample_requests(
            prompts,
            evaluation.samples_per_prompt,
            seed=config.run.seed,
            step=0,
            temperature=temperature,
        )

    async def evaluate(self, step: int) -> EvaluationResult:
        """Evaluates the weights after a step, which the engines have."""
        await self._parts.colocation.to_rollout()
        return await self._parts.engines.require(self.measure(step))

    async def measure(self, step: int) -> EvaluationResult:
        """Evaluates the engines' weights; afterwards the trainers have the devices."""
        rollouts = await self._parts.generator.generate(self._requests, self._chunks).result()
        await self._parts.colocation.to_training()
        scored = await self._parts.scorer.score(rollouts, self._prompts, self._evaluation.functions)
        scores = scored.scores
        whole = Branches.of(rollouts.samples).whole(rollouts.samples)
        metrics = held_out_metrics(scores, whole, self._evaluation)
        total = scores.get(REWARD_MODEL, next(iter(scores.values())))
        count = self._tracking.samples
        columns = no_columns if self._tracking.tokens else None
        samples = shown_samples(rollouts, self._prompts, total, scores, self._tokenizer, count, columns=columns)
        return EvaluationResult(
            step=step,
            metrics={f"eval/{name}": value for name, value in metrics.items()},
            samples=samples,
            prompts=prompt_scores(whole, scores),
        )


def held_out_metrics(scores: ScoresByReward, samples: Sequence[SampleInfo], evaluation: Evaluation) -> dict[str, float]:
    """Returns the metrics of an evaluation, without the prefix of their names.

    `NAME` is the mean over the samples with a score, and `NAME_ci95` half the width of its 95%
    interval: a normal interval with standard errors clustered by prompt, too narrow for fewer than
    about 30 prompts. Means without a score and intervals of a single prompt are left out.
    """
    groups = torch.as_tensor(group_numbers(samples))
    named = dict(scores)
    if REWARD_MODEL in named:
        named = {"score": named.pop(REWARD_MODEL), **named}
    lengths = np.array([sample.response_tokens for sample in samples], dtype=np.float32)
    truncated = np.array([not sample.finished for sample in samples], dtype=np.float32)
    metrics: dict[str, float] = {"prompts": int(groups.max()) + 1, "samples": len(samples)}
    for name, values in named.items():
        metrics |= _mean(name, values, groups)
    for name, values in named.items():
        if name != "score" or len(named) == 1:
            metrics |= _pass_at_k(name, values, groups, evaluation)
    metrics |= _mean("response_length", lengths, groups)
    metrics["response_length_max"] = int(lengths.max())
    metrics |= _mean("truncated_fraction", truncated, groups)
    for name, count in unscored_metrics(named).items():
        metrics[name.removeprefix("rewards/")] = count
    return metrics | conversation_metrics(samples)


def _mean(name: str, values: Values, groups: torch.Tensor) -> dict[str, float]:
    """Returns the mean of the values that are not NaN, and half the width of its interval."""
    known = torch.as_tensor(~np.isnan(values))
    mean, error = clustered_mean(torch.as_tensor(values)[known], groups[known])
    metrics: dict[str, float] = {}
    if not math.isnan(mean):
        metrics[name] = mean
    if not math.isnan(error):
        metrics[f"{name}_ci95"] = STANDARD_ERRORS * error
    return metrics


def _pass_at_k(name: str, values: Values, groups: torch.Tensor, evaluation: Evaluation) -> dict[str, float]:
    """Returns pass@k over the prompts with at least k scored samples."""
    known = torch.as_tensor(~np.isnan(values))
    solved = torch.as_tensor(values >= evaluation.success_at)
    prompts = int(groups.max()) + 1
    samples = torch.bincount(groups[known], minlength=prompts)
    successes = torch.bincount(groups[known & solved], minlength=prompts)
    metrics: dict[str, float] = {}
    for k in evaluation.pass_at:
        enough = samples >= k
        rates = pass_rate(successes[enough], samples[enough], k=k)
        metrics |= _mean(f"{name}_pass_at_{k}", rates.float().numpy(), torch.arange(len(rates)))
    return metrics
