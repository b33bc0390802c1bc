"""Runs without processes: `train_with_restarts` with a trainer, a session and ranks that do as a test plans."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster.driver_environment import ignore_interrupts
from megarl.cluster.session import Session
from megarl.config import TrainingConfig, load
from megarl.loop import train
from megarl.run.results import EvaluationResult, StepResult
from tests.loop.answers import Answered
from tests.loop.answers import run as run_in_loop
from tests.run.staging import write_role

SFT = Path(__file__).parents[2] / "configs" / "debug" / "sft.yaml"
Strike = Callable[[], object]


class Ranks:
    """Two ranks of a role; the second one has written what it saves in the background when it is told."""

    def __init__(self, name: str) -> None:
        self.name, self.written = name, False

    def call(self, method: Any, *args: Any, **options: Any) -> Answered:
        if method.name == "restore":
            return Answered()
        if method.name == "save":
            self._records = write_role(Path(args[0]), 2)
            self.written = not options["in_background"]
        else:
            self.written |= options["wait"]
        last = [None] if not self.written else self._records[1:]
        return Answered(*self._records[:1], *last)


class FakeSession(Session):
    """A session without processes; `ending` comes while it ends."""

    monitor: Any
    ending: Sequence[Strike]

    def __init__(self, *_: Any) -> None:
        self.monitor = self
        self._ending = ExitStack()

    def run[T](self, work: Coroutine[Any, Any, T]) -> T:
        return run_in_loop(work)

    def spawn[T](self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return asyncio.get_running_loop().create_task(work)

    def __enter__(self) -> FakeSession:
        return self

    def __exit__(self, *exception: Any) -> None:
        ignore_interrupts()
        for strike in self.ending:
            strike()
        super().__exit__(*exception)


class FakeTrainer:
    """A trainer that fails as planned: `strikes` are the next ones, by what it does; `done` is all that it did."""

    strikes: list[tuple[str, Strike]]
    updates: Mapping[int, Mapping[str, float]]
    done: list[str]
    living: weakref.WeakSet[FakeTrainer]
    evaluate_every = 2

    def __init__(self, *_: Any) -> None:
        assert not self.living, "an earlier attempt is still in memory"
        self.living.add(self)
        self.roles = {"actor": Ranks("actor")}
        self._step = 0
        self._itself = self  # as parts of a trainer refer to each other

    def _do(self, what: str) -> None:
        self.done.append(what)
        if self.strikes and self.strikes[0][0] == what:
            self.strikes.pop(0)[1]()

    async def start(self) -> None:
        self._do("start")

    async def begin(self, step: int) -> dict[str, float]:
        return {}

    async def step(self, step: int) -> StepResult:
        self._step = step
        self._do(f"step {step}")
        return StepResult(step=step, metrics={"sft/loss": 1.0 / step}, updates=[self.updates.get(step, {})])

    async def evaluate(self, step: int) -> EvaluationResult:
        self._do(f"evaluation {step}")
        return EvaluationResult(step=step, metrics={})

    async def evaluations(self, *, wait: bool) -> Sequence[Any]:
        return ()

    async def to_training(self) -> None: ...

    def state(self, directory: Path) -> dict[str, Any]:
        self._do(f"checkpoint {self._step}")
        return {}

    def load(self, state: Any, directory: Path) -> None: ...

    async def finish(self, export: Path) -> dict[str, float]:
        self._do("export")
        return {}

    async def close(self) -> None: ...


Run = Callable[..., Path]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Trains four steps with a checkpoint of every second one and given failures; returns the run's directory."""

    def train_with(
        *strikes: tuple[str, Strike],
        overrides: Sequence[str] = ("run.max_restarts=3",),
        ending: Sequence[Strike] = (),
        updates: Mapping[int, Mapping[str, float]] = {},
    ) -> Path:
        directory = tmp_path / "run"
        config = load(SFT, [f"run.dir={directory}", "checkpoint={every: 2, async_save: false}", *overrides])
        assert isinstance(config, TrainingConfig)
        monkeypatch.setattr(FakeTrainer, "strikes", list(strikes), raising=False)
        monkeypatch.setattr(FakeTrainer, "updates", updates, raising=False)
        monkeypatch.setattr(FakeTrainer, "done", [], raising=False)
        monkeypatch.setattr(FakeTrainer, "living", weakref.WeakSet(), raising=False)
        monkeypatch.setattr(FakeSession, "ending", list(ending), raising=False)
        monkeypatch.setattr(train, "Session", FakeSession)
        monkeypatch.setattr(train, "trainer_class", lambda _config: FakeTrainer)
        train.train_with_restarts(config)
        return directory

    return train_with
