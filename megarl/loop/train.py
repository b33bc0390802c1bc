"""A training run of any stage, from its last checkpoint to the export."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol

from megarl.cluster.calls import WorkerError
from megarl.cluster.cpu_threads import kept_message, with_threads
from megarl.cluster.driver_environment import interrupts_raise, no_interrupt_is_lost, noted_signals
from megarl.cluster.session import Session
from megarl.cluster.step_profiler import StepProfiler
from megarl.config import ConfigError, Problem, RolloutTrainingConfig, RunConfig, TrainingConfig
from megarl.errors import RunError
from megarl.groups.trainers import RemoteRole, check_gpus
from megarl.loop.saver import Saver
from megarl.loop.skipped_steps import SkippedSteps
from megarl.megatron.worker import MegatronWorker
from megarl.preflight.check import check, check_login
from megarl.preflight.device_memory import check_memory
from megarl.preflight.epochs import with_steps
from megarl.preflight.trial_calls import call_functions
from megarl.run.checkpoints import ROLLOUTS, Checkpoint
from megarl.run.directory import RunDirectory, attempt, model_directory
from megarl.run.display import phase_line
from megarl.run.preemption import Preemption, end_of_time
from megarl.run.report import Reporter, Summary, processes
from megarl.run.restarts import Restarts
from megarl.run.results import EvaluationResult, StepResult
from megarl.run.resume import finished_message, resumed_config
from megarl.run.sinks import Metrics
from megarl.run.timers import process_age, stopwatch
from megarl.texts import counted
from megarl.types import RoleName


class Trainer(Protocol):
    """The trainer of a stage. Every method returns when its work is done."""

    roles: Mapping[RoleName, RemoteRole]
    """All roles; those in `config.saved` are part of checkpoints."""
    evaluate_every: int | None
    """Steps between evaluations; None: only before the first step and after the last."""

    async def start(self) -> None:
        """Starts every process and loads every model."""

    async def begin(self, step: int) -> Metrics:
        """Prepares the first step of this process; `step` is the last one taken, by a checkpoint."""
        return {}

    async def step(self, step: int) -> StepResult:
        """Takes a step."""
        ...

    async def evaluate(self, step: int) -> EvaluationResult | None:
        """Evaluates on held-out data; None without any, or if `evaluations` returns the result."""

    async def evaluations(self, *, wait: bool) -> Sequence[EvaluationResult]:
        """Pops the results of finished evaluations beside the training; with `wait`, of all."""
        return ()

    async def to_training(self) -> None:
        """Gives the devices to the trained roles, which are about to be saved."""

    def state(self, directory: Path) -> dict[str, Any]:
        """Returns the driver's part of a checkpoint, as JSON; may write files into its directory."""
        ...

    def load(self, state: Mapping[str, Any], directory: Path) -> None:
        """Loads `state()`."""

    async def finish(self, export: Path) -> Metrics:
        """Writes the trained model as a Hugging Face directory, and returns metrics of it."""
        ...

    async def close(self) -> None:
        """Lets every process end by itself."""


def trainer_class(config: TrainingConfig) -> Callable[..., Trainer]:
    """Imports the class of the trainer of a stage."""
    return resolve_name(config.trainer)


def train_with_restarts(config: TrainingConfig) -> Summary:
    """Runs a stage from the last checkpoint in run.dir on; a finished run returns its summary.

    After a failure that may pass, all processes are ended, and the run goes on from
    its last checkpoint.

    Raises:
        ConfigError: The model, the data or run.dir cannot be used.
        RunError: The run failed, and is not restarted; see `Restarts`.
        PreemptedError: The run had to leave, and has saved.
    """
    config, data = checked(config)
    restarts = Restarts(config)
    clock = process_age
    with interrupts_raise():  # also between two attempts
        while True:
            config = restarts.config
            directory = RunDirectory(config)
            if directory.finished:
                print(finished_message(config), flush=True)
                return Summary.read(directory.summary)
            with noted_signals() as signals:
                try:
                    return _attempt(config, data, directory, clock)
                except RunError as error:
                    if signals():  # one that came while the attempt ended
                        raise
                    print(restarts.after(error, directory), flush=True)
            clock = stopwatch()
            gc.collect()  # what is left of the attempt has references to objects of its Ray


def _attempt(config: TrainingConfig, data: Any, directory: RunDirectory, clock: Callable[[], float]) -> Summary:
    """Takes the steps that are left, in new processes; `clock` gives the seconds of this attempt."""
    with (
        _started(config, data, directory, clock) as (session, trainer, reporter, saver),
        Preemption(
            config.run.grace_period, end_of_time(config.run, os.environ), in_job="SLURM_JOB_ID" in os.environ
        ) as preemption,
    ):
        return session.run(train(config, directory, session, trainer, reporter, saver, preemption))


async def train(
    config: TrainingConfig,
    directory: RunDirectory,
    session: Session,
    trainer: Trainer,
    reporter: Reporter,
    saver: Saver,
    preemption: Preemption,
) -> Summary:
    """Takes the steps that are left, evaluates and saves between them, and exports the model."""
    taken = directory.step
    reporter.started(await trainer.begin(taken))
    if taken == 0:
        reporter.evaluated(await trainer.evaluate(0))
    profiler = StepProfiler(config, session, directory.profile)
    limits = (UnscoredSteps(config), SkippedSteps(config, directory))
    for step in range(taken + 1, config.steps + 1):
        reporter.trace.begin(step)
        async with profiler.step(step):
            result = await trainer.step(step)
        reporter.write(result)
        for limit in limits:
            limit.add(result)
        await saver.check()
        if is_due(step, trainer.evaluate_every, config.steps):
            reporter.evaluated(await trainer.evaluate(step))
        alarm = reporter.alarm(step)
        leaves = preemption.leaves(saver.expected_s)
        saves = leaves or alarm is not None or is_due(step, config.checkpoint.every, config.steps)
        for evaluation in await trainer.evaluations(wait=saves):
            reporter.evaluated(evaluation)
        if saves:
            reporter.phase("checkpoint")
            await saver.save(step)
        if alarm is not None:
            await saver.wait()
            raise RunError(f"health.stop: {alarm.text}; step {step} is saved, and the same command goes on")
        if saves and step < config.steps:
            await preemption.saved(step, saver.wait)
    export = await trainer.finish(directory.export)
    await trainer.close()
    return reporter.finished(export)


def profile(config: TrainingConfig) -> None:
    """Takes the steps of a run up to the last profiled one; evaluates and saves nothing.

    Raises:
        ConfigError, RunError: See `train_with_restarts`.
    """
    config, data = checked(config)
    assert config.profile is not None, "no steps are profiled"
    last = max(config.profile.profiled_steps(config.steps))
    directory = RunDirectory(config)

    async def take_steps() -> None:
        reporter.started(await trainer.begin(0))
        profiler = StepProfiler(config, session, directory.profile)
        for step in range(1, last + 1):
            reporter.trace.begin(step)
            async with profiler.step(step):
                result = await trainer.step(step)
            reporter.write(result)

    with _started(config, data, directory, profiles=True) as (session, trainer, reporter, _):
        session.run(take_steps())


def checked[C: RunConfig](config: C) -> tuple[C, Any]:
    """Returns the final configuration and the data of a run; raises ConfigError if it cannot start."""
    print(phase_line("checking models, data and functions", process_age()), flush=True)
    data = check(config)
    config = with_steps(config, data)
    check_login(config.tracking)
    call_functions(config, data)
    check_gpus(config)
    check_memory(config)
    earlier = resumed_config(config)
    message = kept_message(config, earlier)
    if message is not None:
        print(message, flush=True)
    return with_threads(config, earlier), data


@contextmanager
def _started(
    config: TrainingConfig,
    data: Any,
    directory: RunDirectory,
    clock: Callable[[], float] = process_age,
    *,
    profiles: bool = False,
) -> Generator[tuple[Session, Trainer, Reporter, Saver]]:
    """Starts every process, loads the last checkpoint, and ends all processes after the block."""
    taken = directory.step
    session = Session(config.cluster, directory.logs)
    with (
        closing(directory),
        attempt(directory, taken, "profiled" if profiles else "finished", clock) as interrupts_are_recorded,
        Reporter(config, directory, taken, data.left_out, clock) as reporter,
        ExitStack() as opened,
    ):
        with no_interrupt_is_lost():
            reporter.phase("Ray")
            opened.enter_context(session)
            opened.enter_context(interrupts_are_recorded())
            session.monitor.observer = reporter.trace.ran
            reporter.phase(f"{processes(config)} with their models")
            model_dir = model_directory(config, directory.path)
            trainer = trainer_class(config)(config, session, model_dir, data, reporter.phase)
            session.run(_start(trainer, config, directory.latest, reporter))
        saver = opened.enter_context(closing(Saver(config, directory, trainer, session)))
        try:
            yield session, trainer, reporter, saver
        except RunError as error:
            if not isinstance(error, WorkerError):  # the ranks are well: what they write is not lost
                with suppress(RunError):
                    session.run(saver.wait())
            raise


class UnscoredSteps:
    """Counts the last steps without a scored response, up to `reward.max_unscored_steps`."""

    def __init__(self, config: TrainingConfig) -> None:
        self._limit: int | None = None
        if isinstance(config, RolloutTrainingConfig) and config.reward.max_unscored_steps is not None:
            self._limit = min(config.reward.max_unscored_steps, config.steps)
        self._steps = 0

    def add(self, result: StepResult) -> None:
        """Takes the result of a step; raises RunError, with the step's failures, at the limit."""
        sampled = result.metrics.get("rollout/samples", 0)
        unscored = sampled > 0 and result.metrics.get("rewards/unscored") == sampled
        self._steps = self._steps + 1 if unscored else 0
        if self._limit is not None and self._steps >= self._limit:
            message = f"no response of the last {counted(self._steps, 'step')} has a score (reward.max_unscored_steps)"
            causes = result.failures or ["rewards/unscored in metrics.jsonl has the reward at fault"]
            raise RunError("\n".join([f"{message}; correct the reward, and start the run again", *causes]))


def is_due(step: int, every: int | None, last: int) -> bool:
    """Returns whether something happens after a step: after every so many, and after the last."""
    return step == last or (every is not None and step % every == 0)


async def _start(trainer: Trainer, config: TrainingConfig, checkpoint: Checkpoint | None, reporter: Reporter) -> None:
    """Starts the processes, and loads a checkpoint; raises ConfigError if its data has changed."""
    if checkpoint is not None:
        try:
            trainer.load(checkpoint.state, checkpoint.path / ROLLOUTS)
        except ValueError as error:
            fix = "restore the files that the run began with, or choose another run.dir"
            raise ConfigError([Problem(field="data", value="changed", rule=str(error), fix=fix)]) from error
    await trainer.start()
    if checkpoint is not None:
        reporter.phase("the checkpoint")
        roles = [trainer.roles[name] for name in config.saved]
        for call in [role.call(MegatronWorker.restore, str(checkpoint.path / role.name)) for role in roles]:
            await call
