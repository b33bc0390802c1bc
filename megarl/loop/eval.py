"""An evaluation by itself: any Hugging Face directory answers held-out prompts."""

from __future__ import annotations

import time
from contextlib import closing

from megarl.cluster.session import Session
from megarl.config import EvalConfig
from megarl.loop.assets import model_directory
from megarl.loop.attempt import attempt
from megarl.loop.datasets import PromptSets
from megarl.loop.directory import EvaluationDirectory
from megarl.loop.evaluate import Evaluator
from megarl.loop.evaluation_report import EvaluationReporter
from megarl.loop.preflight import check
from megarl.loop.report import Summary
from megarl.loop.scoring import scorer_of
from megarl.loop.setup import check_gpus, launch_engines, launch_rules, launch_trainers, start_all
from megarl.loop.stage import EvaluationResult

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
        print(data.left_out.told(directory.left_out), flush=True)
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
