"""Evaluation on held-out prompts: within a run, and of any Hugging Face directory."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from statistics import NormalDist

import numpy as np
import torch

from megarl.algos.metrics import clustered_mean, pass_rate
from megarl.cluster.engines import RolloutGroup
from megarl.cluster.session import Session
from megarl.cluster.trainers import Role
from megarl.config import EvalConfig, PPOConfig, RAFTConfig
from megarl.config.schema import Evaluation
from megarl.data.prompts import sample_requests
from megarl.data.tokenizer import Tokenizer
from megarl.loop.assets import model_directory
from megarl.loop.colocation import Turns
from megarl.loop.score_batch import group_numbers
from megarl.loop.scoring import REWARD_MODEL, Scorer, Sources, Values, scorer_of, unscored_metrics
from megarl.loop.setup import Trainers, check_gpus, launch_engines, launch_rules, launch_trainers, start_all
from megarl.preflight.check import check
from megarl.preflight.datasets import PromptSets
from megarl.run.directory import EvaluationDirectory, attempt
from megarl.run.report import EvaluationReporter, Summary
from megarl.run.results import EvaluationResult
from megarl.run.samples import shown_samples
from megarl.types import Prompt, SampleInfo

_ERRORS = NormalDist().inv_cdf(0.975)
"""This many standard errors to each side hold 95% of a normal distribution."""


class Evaluator:
    """Answers the same prompts with the same seeds every time, so that two evaluations differ by the weights alone.

    Args:
        evaluation: of the configuration.
        prompts: held out.
        engines: that answer.
        scorer: of the responses.
        chunks: into which the samples are divided.
        seed: of the run.
        tokenizer: for samples to read.
        shown: how many samples are kept for reading.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        prompts: Sequence[Prompt],
        engines: RolloutGroup,
        scorer: Scorer,
        *,
        chunks: int,
        seed: int,
        tokenizer: Tokenizer | None,
        shown: int,
    ) -> None:
        self._evaluation, self._engines, self._scorer = evaluation, engines, scorer
        self._chunks, self._tokenizer, self._shown = chunks, tokenizer, shown
        self._prompts = {prompt.prompt_id: prompt for prompt in prompts}
        temperature = 0.0 if evaluation.greedy else evaluation.temperature
        self._requests = sample_requests(
            prompts, evaluation.samples_per_prompt, seed=seed, step=0, temperature=temperature
        )

    def evaluate(self, step: int, answered: Callable[[], None], *, prefix: str = "eval") -> EvaluationResult:
        """Generates with the weights that the engines have, and scores.

        Args:
            step: after which it is.
            answered: called when the engines have answered.
            prefix: of the metrics' names.
        """
        rollouts = self._engines.generate(self._requests, self._chunks)
        answered()
        scores = self._scorer.submit(rollouts, self._prompts, self._evaluation.functions).wait()
        metrics = held_out_metrics(scores, rollouts.samples, self._evaluation)
        total = scores.get(REWARD_MODEL, next(iter(scores.values())))
        return EvaluationResult(
            step=step,
            metrics={f"{prefix}/{name}": value for name, value in metrics.items()},
            samples=shown_samples(rollouts, total, scores, self._tokenizer, self._shown),
        )


class TrainingEvaluator:
    """Evaluates the actor between the steps of its training, and the moving average of its weights where that is asked.

    Args:
        evaluator: of the run.
        actor: whose weights the engines get.
        turns: of trainers and engines.
        average: evaluate the average as well.
    """

    def __init__(self, evaluator: Evaluator, actor: Role, turns: Turns, *, average: bool) -> None:
        self._evaluator, self._actor, self._turns, self._average = evaluator, actor, turns, average

    def evaluate(self, step: int, version: int) -> EvaluationResult:
        """The actor's metrics as ``eval/*``, those of the average as ``eval_ema/*``; the samples are the actor's.

        Args:
            step: after which it is.
            version: of the last sync; the engines have the actor's weights before and afterwards.
        """
        self._turns.back_to_engines(version)
        result = self._evaluator.evaluate(step, self._turns.to_trainers)
        if not self._average:
            return result
        self._actor.use_average(True).wait()
        self._turns.to_engines(version)
        average = self._evaluator.evaluate(step, self._turns.to_trainers, prefix="eval_ema")
        self._actor.use_average(False).wait()
        self._turns.to_engines(version)
        return dataclasses.replace(result, metrics={**result.metrics, **average.metrics})


def training_evaluator(
    config: PPOConfig | RAFTConfig,
    data: PromptSets,
    engines: RolloutGroup,
    scorer: Scorer,
    trainers: Trainers,
    turns: Turns,
) -> TrainingEvaluator | None:
    """That of a run; None where it evaluates nothing."""
    if config.evaluation is None:
        return None
    evaluator = Evaluator(
        config.evaluation,
        data.held_out,
        engines,
        scorer,
        chunks=trainers.chunks,
        seed=config.run.seed,
        tokenizer=data.tokenizer,
        shown=config.tracking.samples,
    )
    return TrainingEvaluator(evaluator, trainers.roles["actor"], turns, average=config.evaluation.ema)


def held_out_metrics(scores: Sources, samples: Sequence[SampleInfo], evaluation: Evaluation) -> dict[str, float]:
    """What an evaluation says, without the prefix of the names.

    Means over the samples that have a score, ``NAME``, with the half widths of their 95% intervals, ``NAME_ci95``: a
    normal interval, whose error counts the samples of a prompt as alike. With few prompts (under 30, say) it is too
    narrow. What nothing is known of is left out: means without a score, and the half widths of a single prompt.

    Args:
        scores: [N] by source; NaN where a sample has none.
        samples: N.
        evaluation: of the configuration.
    """
    groups = torch.from_numpy(group_numbers(samples))
    named = {"score" if name == REWARD_MODEL else name: values for name, values in scores.items()}
    lengths = np.array([sample.response_tokens for sample in samples], dtype=np.float32)
    truncated = np.array([not sample.finished for sample in samples], dtype=np.float32)
    metrics: dict[str, float] = {"prompts": int(groups.max()) + 1, "samples": len(samples)}
    for name, values in named.items():
        metrics.update(_mean(name, values, groups))
    for name, values in named.items():
        if name != "score" or len(named) == 1:
            metrics.update(_passes(name, values, groups, evaluation))
    metrics.update(_mean("response_length", lengths, groups))
    metrics["response_length_max"] = int(lengths.max())
    metrics.update(_mean("truncated_fraction", truncated, groups))
    unscored = unscored_metrics(named)
    return {**metrics, **{name.removeprefix("rewards/"): count for name, count in unscored.items()}}


def _mean(name: str, values: Values, groups: torch.Tensor) -> dict[str, float]:
    """The mean of the values that are known, and the half width of its interval, where these are known themselves."""
    known = torch.from_numpy(~np.isnan(values))
    mean, error = clustered_mean(torch.from_numpy(values)[known], groups[known])
    told = {name: mean, f"{name}_ci95": _ERRORS * error}
    return {key: value for key, value in told.items() if not math.isnan(value)}


def _passes(name: str, values: Values, groups: torch.Tensor, evaluation: Evaluation) -> dict[str, float]:
    """pass@k over the prompts that have k scored samples."""
    known = torch.from_numpy(~np.isnan(values))
    solved = torch.from_numpy(values >= evaluation.success_at)
    prompts = int(groups.max()) + 1
    samples = torch.bincount(groups[known], minlength=prompts)
    successes = torch.bincount(groups[known & solved], minlength=prompts)
    metrics: dict[str, float] = {}
    for k in evaluation.pass_at:
        enough = samples >= k
        rates = pass_rate(successes[enough], samples[enough], k=k)
        metrics.update(_mean(f"{name}_pass_at_{k}", rates.float().numpy(), torch.arange(len(rates))))
    return metrics


_CHUNKS_PER_ENGINE = 8
"""Small enough for engines to share the work evenly."""


def evaluate(config: EvalConfig) -> Summary:
    """Evaluates the model of a configuration; leaves nothing behind but run.dir.

    Raises:
        ConfigError: the model, the data or run.dir cannot be used.
        RunError: the evaluation cannot go on, for the reason that the message gives.
    """
    start = time.perf_counter()
    data = check(config)
    assert isinstance(data, PromptSets)
    check_gpus(config)
    directory = EvaluationDirectory(config)
    session = Session(config.cluster, directory.logs, config.cluster.address)
    if data.left_out.rows:
        data.left_out.write(directory.left_out)
        print(data.left_out.message(directory.left_out), flush=True)
    with closing(directory), attempt(directory):
        with EvaluationReporter(config, directory) as reporter, session:
            result = _result(config, session, directory, data)
            reporter.write(result, f"{config.model.path or 'a random model'} on {config.evaluation.prompts.path}")
        seconds = time.perf_counter() - start
        summary = Summary(stage=config.stage, steps=0, seconds=seconds, evaluation=result.metrics)
        summary.write(directory.summary)
    print(f"{len(data.held_out)} prompts in {seconds:.0f} s; samples are in {directory.samples}", flush=True)
    return summary


def _result(config: EvalConfig, session: Session, directory: EvaluationDirectory, data: PromptSets) -> EvaluationResult:
    """Starts every process, answers and scores; then every process has ended by itself."""
    model_dir = model_directory(config, directory.path)
    trainers = launch_trainers(config, session)
    engines = launch_engines(config, config.rollout, session, model_dir, weights="files")
    rules = launch_rules(config, session, model_dir)
    start_all(trainers, engines, rules, model_dir, sleep=config.rollout.sleep)
    print(f"the processes print into {directory.logs}", flush=True)
    evaluator = Evaluator(
        config.evaluation,
        data.held_out,
        engines,
        scorer_of(config, config.reward, trainers.roles, rules, engines),
        chunks=max(trainers.chunks, _CHUNKS_PER_ENGINE * config.rollout.engines),
        seed=config.run.seed,
        tokenizer=data.tokenizer,
        shown=config.tracking.samples,
    )
    trainers.rest()
    engines.wake_weights()
    engines.wake_cache()
    result = evaluator.evaluate(0, engines.sleep)
    ending = [engines.close()] if rules is None else [engines.close(), rules.close()]
    trainers.close()
    for call in ending:
        call.wait()
    return result
