"""A run of any stage: its directory and processes, its steps from the last checkpoint on, and its export."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final, Protocol

from megarl.cluster.session import Session
from megarl.cluster.trainers import Role
from megarl.config import ConfigError, Problem, TrainingConfig
from megarl.loop.ppo import PPO
from megarl.loop.raft import RewardRanked
from megarl.loop.reward_model import RewardModel
from megarl.loop.setup import Trainers, check_gpus
from megarl.loop.supervised import SFT
from megarl.preflight.check import check
from megarl.run.checkpoints import Checkpoint
from megarl.run.directory import RunDirectory, attempt
from megarl.run.report import Reporter, Summary, read_summary
from megarl.run.results import EvaluationResult, Metrics, StepResult


class Stage(Protocol):
    """A stage of training, run by ``loop.run``. Every method waits until its work is done."""

    @property
    def trainers(self) -> Trainers:
        """The groups and roles; the trained ones are in checkpoints."""
        ...

    def start(self) -> None:
        """Starts every process and loads every model."""
        ...

    def begin(self, step: int) -> Metrics:
        """Makes ready for the first step of this process, after a checkpoint was loaded if there was one.

        Args:
            step: the last one taken; 0 at a run's beginning.

        Returns:
            What is worth saying of it.
        """
        ...

    def step(self, step: int) -> StepResult:
        """Takes a step."""
        ...

    @property
    def evaluate_every(self) -> int | None:
        """Steps between evaluations; None: before the first step and after the last."""
        ...

    def evaluate(self, step: int) -> EvaluationResult | None:
        """Looks at held-out data; None where there is none."""
        ...

    def make_room(self) -> None:
        """Gives the trained roles their devices, which engines may have, before they are saved."""
        ...

    def state(self) -> dict[str, Any]:
        """What the driver must know to go on from here, as JSON."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from where ``state`` was taken."""
        ...

    def finish(self, export: Path) -> Metrics:
        """Writes the trained model, and returns what is worth saying of it.

        Args:
            export: Hugging Face directory to make.
        """
        ...

    def close(self) -> None:
        """Lets every process end by itself."""
        ...


STAGES: Final[Mapping[str, Any]] = {"sft": SFT, "reward_model": RewardModel, "ppo": PPO, "raft": RewardRanked}


def train(config: TrainingConfig) -> Summary:
    """Runs a stage, or goes on with it where run.dir has a checkpoint; leaves nothing behind but run.dir.

    A run that is finished stays as it is, and says so.

    Raises:
        ConfigError: the model, the data or run.dir cannot be used.
        RunError: the run cannot go on, for the reason that the message gives.
    """
    start = time.perf_counter()
    data = check(config)
    check_gpus(config)
    directory = RunDirectory(config)
    if directory.finished:
        return read_summary(directory)
    taken = 0 if directory.latest is None else directory.latest.step
    session = Session(config.cluster, directory.logs, config.cluster.address)
    with (
        closing(directory),
        attempt(directory, taken),
        Reporter(config, directory, taken, data.left_out) as reporter,
        session,
    ):
        stage: Stage = STAGES[config.stage](config, session, directory, data, reporter.phase)
        if directory.latest is not None:
            _load(stage, directory.latest)
        stage.start()
        if directory.latest is not None:
            _restore(stage, config, directory.latest)
        ready = stage.begin(taken)
        reporter.started(time.perf_counter() - start, ready)
        if taken == 0:
            reporter.evaluated(stage.evaluate(0))
        for step in range(taken + 1, config.run.steps + 1):
            reporter.write(stage.step(step))
            if _due(step, stage.evaluate_every, config.run.steps):
                reporter.evaluated(stage.evaluate(step))
            if _due(step, config.checkpoint.every, config.run.steps):
                reporter.phase("checkpoint")
                _save(stage, config, directory, step)
        export = stage.finish(directory.export)
        stage.close()
        return reporter.finished(export, time.perf_counter() - start)


def _due(step: int, every: int | None, last: int) -> bool:
    """Every so many steps, and after the last."""
    return step == last or (every is not None and step % every == 0)


def _save(stage: Stage, config: TrainingConfig, directory: RunDirectory, step: int) -> None:
    """Every role that changes writes its part; one rename makes it a checkpoint."""
    stage.make_room()
    staged = directory.checkpoints.stage(step)
    calls = {role.name: role.save(staged) for role in _saved(stage, config)}
    directory.sync()
    directory.checkpoints.commit(step, {name: call.wait() for name, call in calls.items()}, stage.state())


def _load(stage: Stage, checkpoint: Checkpoint) -> None:
    """Brings the driver's part of the stage to where the checkpoint was made.

    Raises:
        ConfigError: the data is not what it was.
    """
    try:
        stage.load(checkpoint.state)
    except ValueError as error:
        fix = "restore the files that the run began with, or choose another run.dir"
        raise ConfigError([Problem(field="data", value="changed", rule=str(error), fix=fix)]) from error


def _restore(stage: Stage, config: TrainingConfig, checkpoint: Checkpoint) -> None:
    """Brings the roles that change to where the checkpoint was made."""
    for call in [role.restore(checkpoint.path) for role in _saved(stage, config)]:
        call.wait()


def _saved(stage: Stage, config: TrainingConfig) -> list[Role]:
    return [stage.trainers.roles[name] for name in config.saved]
