"""The evaluation of a checkpoint."""

from __future__ import annotations

from contextlib import closing
from typing import Final

from megarl.cluster.session import Session
from megarl.config import RunConfig
from megarl.groups.colocation import Colocation
from megarl.groups.engines import launch_engines
from megarl.groups.trainers import close_all, launch_trainers, start_all
from megarl.loop.evaluate import Evaluator
from megarl.loop.sampler import RolloutParts
from megarl.loop.train import checked
from megarl.preflight.datasets import Sets
from megarl.preflight.memory_plan import besides_cache
from megarl.run.directory import EvaluationDirectory, attempt, model_directory
from megarl.run.report import EvaluationReporter, Summary
from megarl.run.results import EvaluationResult
from megarl.run.timers import process_age
from megarl.stages.eval.config import EvalConfig
from megarl.texts import counted

_CHUNKS_PER_ENGINE: Final = 8
"""Enough to balance the engines."""


def evaluate(config: RunConfig) -> Summary:
    """Evaluates the model of a configuration.

    Raises:
        ConfigError: The model, the data or run.dir cannot be used.
        RunError: The evaluation failed.
    """
    assert isinstance(config, EvalConfig)
    config, data = checked(config)
    directory = EvaluationDirectory(config)
    session = Session(config.cluster, directory.logs)
    if data.left_out.rows:
        data.left_out.write(directory.left_out)
        print(data.left_out.message(directory.left_out), flush=True)
    with closing(directory), attempt(directory) as interrupts_are_recorded:
        with EvaluationReporter(config, directory) as reporter, session, interrupts_are_recorded():
            result = session.run(_evaluate_model(config, session, directory, data))
            reporter.write(result, f"{config.model.path or 'a random model'} on {config.evaluation.source}")
        seconds = process_age()
        summary = Summary(stage=config.stage, steps=0, seconds=seconds, evaluation=result.metrics)
        summary.write(directory.summary)
    count = len(data.rows["evaluation.prompts"])
    print(f"{counted(count, 'prompt')} in {seconds:.0f} s; samples are in {directory.samples}", flush=True)
    return summary


async def _evaluate_model(
    config: EvalConfig, session: Session, directory: EvaluationDirectory, data: Sets
) -> EvaluationResult:
    model_dir = model_directory(config, directory.path)
    trainers = launch_trainers(config, session)
    besides = besides_cache(config)
    engines = launch_engines(config, config.rollout, session, model_dir, weights="files", besides_cache=besides)
    colocation = Colocation(trainers, engines, None, sleep=config.rollout.sleep)
    parts = RolloutParts.launch(config, session, model_dir, trainers, colocation)
    await start_all(trainers, engines, parts.services, model_dir, sleep=config.rollout.sleep)
    print(f"the processes print into {directory.logs}", flush=True)
    chunks = max(trainers.chunks(), _CHUNKS_PER_ENGINE * config.rollout.engines)
    result = await Evaluator(config, data, parts, chunks).evaluate(0)
    await close_all(trainers, engines, parts.services)
    return result
