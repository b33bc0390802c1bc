"""The steps of a run that gets a signal."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from megarl.cluster.driver_environment import interrupts_raise
from megarl.config import TrainingConfig, load
from megarl.errors import PreemptedError
from megarl.loop import train
from megarl.run.results import EvaluationResult, StepResult
from tests.config.debug import DEBUG
from tests.loop.answers import run

Start = Callable[..., list[str]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Start:
    """Trains without processes, and returns what it does; a signal comes in the phases that are named."""

    def trained(stage: str, *signals: str, every: int | None = None) -> list[str]:
        done: list[str] = []

        def do(what: str) -> None:
            done.append(what)
            if what in signals:
                os.kill(os.getpid(), signal.SIGTERM)

        async def step(number: int) -> StepResult:
            do(f"step {number}")
            return StepResult(step=number, metrics={}, updates=[])

        async def evaluate(number: int) -> EvaluationResult:
            do(f"evaluation {number}")
            return EvaluationResult(step=number, metrics={})

        async def note(what: str) -> None:
            do(what)

        trainer = MagicMock(evaluate_every=2, roles={})
        trainer.step, trainer.evaluate = step, evaluate
        trainer.begin, trainer.close = AsyncMock(), AsyncMock()
        trainer.evaluations = AsyncMock(return_value=())
        trainer.finish = lambda _: note("export")

        saver = MagicMock(expected_s=0.0, check=AsyncMock())
        saver.save = lambda number: note(f"checkpoint {number}")
        saver.wait = lambda: note("committed")
        reporter = MagicMock()
        reporter.alarm.return_value = None

        @contextmanager
        def started(*_: Any) -> Iterator[Any]:
            with interrupts_raise():
                yield SimpleNamespace(run=run), trainer, reporter, saver

        config = load(DEBUG.with_stem(stage), [f"run.dir={tmp_path / 'run'}", "run.steps=4", "run.epochs=null"])
        assert isinstance(config, TrainingConfig)
        config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"every": every})})
        directory = SimpleNamespace(
            finished=False,
            step=0,
            export=tmp_path,
            updates=tmp_path / "none",
            skipped=tmp_path,
            profile=tmp_path,
        )
        monkeypatch.setattr(train, "_checked", lambda given: (given, None))
        monkeypatch.setattr(train, "RunDirectory", lambda _: directory)
        monkeypatch.setattr(train, "_started", started)
        try:
            train.train_with_restarts(config)
        except PreemptedError as error:
            done.append(str(error).partition(":")[0])
        return done[1:]  # without the evaluation at the beginning

    return trained


@pytest.mark.parametrize("stage", ["sft", "reward_model", "ppo", "raft"])
def test_a_run_finishes_its_step_and_saves_it(start: Start, stage: str) -> None:
    assert start(stage, "step 1") == ["step 1", "checkpoint 1", "committed", "preempted after step 1"]


def test_what_follows_a_step_comes_before_its_checkpoint(start: Start) -> None:
    expected = ["step 1", "step 2", "evaluation 2", "checkpoint 2", "committed", "preempted after step 2"]
    assert start("sft", "step 2") == start("sft", "evaluation 2") == expected
    assert start("sft", "checkpoint 2", every=2) == expected, "it is being saved already"


def test_a_run_after_its_last_step_exports(start: Start) -> None:
    whole = start("sft")
    assert whole[-3:] == ["evaluation 4", "checkpoint 4", "export"]
    assert start("sft", "step 4") == start("sft", "checkpoint 4") == whole
