"""Checkpoints that are written while the training goes on: what is saved, when it counts, and how it fails."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any, cast

import pytest

from megarl.errors import RunError
from megarl.loop import saver as saving
from megarl.loop.saver import Saver
from megarl.run.checkpoints import BrokenCheckpointError
from megarl.run.directory import RunDirectory
from tests.loop.answers import run
from tests.loop.training import Ranks
from tests.run.test_directory import debug


class Training:
    """A trainer with two roles, and the session of its calls."""

    def __init__(self) -> None:
        self.roles = {name: Ranks(name) for name in ("actor", "critic")}
        self.position: dict[str, Any] = {"taken": [1, 2]}

    async def to_training(self) -> None:
        pass

    def state(self, directory: Path) -> dict[str, Any]:
        directory.mkdir()
        (directory / "step-3").write_text(f"{self.position}")
        return self.position

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(work)


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Training:
    monkeypatch.setattr(saving, "_INTERVAL_S", 0.01)
    return Training()


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RunDirectory]:
    with closing(RunDirectory(debug(tmp_path / "run"))) as made:
        yield made


@pytest.fixture
def saver(training: Training, directory: RunDirectory) -> Iterator[Saver]:
    given: Any = training
    with closing(Saver(debug(directory.path), directory, given, given)) as made:
        yield made


async def until(happened: Callable[[], object]) -> None:
    """Waits as the driver does in a step."""
    async with asyncio.timeout(20):
        while not happened():
            await asyncio.sleep(0.01)


def test_a_checkpoint_counts_when_all_ranks_have_written(
    training: Training, directory: RunDirectory, saver: Saver
) -> None:
    """Nobody asks for it; the driver's state is that of the save."""

    async def train() -> None:
        await saver.save(2)
        training.position["taken"].append(3)
        training.roles["actor"].written = True
        for _ in range(3):
            await asyncio.sleep(0.02)
            await saver.check()
        assert (directory.checkpoints.steps(), directory.checkpoints.staged_step()) == ([], 2)
        training.roles["critic"].written = True
        await until(directory.checkpoints.steps)
        await saver.check()

    run(train())
    latest = directory.checkpoints.latest()
    assert latest is not None
    assert (latest.step, latest.state, latest.roles) == (2, {"taken": [1, 2]}, ("actor", "critic"))
    assert (latest.path / "rollouts/step-3").read_text() == "{'taken': [1, 2]}"


def test_a_save_waits_for_the_one_before(directory: RunDirectory, saver: Saver) -> None:
    async def train() -> None:
        await saver.save(2)
        assert directory.checkpoints.steps() == []
        await saver.save(4)
        assert (directory.checkpoints.steps(), directory.checkpoints.staged_step()) == ([2], 4)
        await saver.wait()
        assert (directory.checkpoints.steps(), directory.checkpoints.staged_step()) == ([2, 4], None)
        await saver.wait()

    run(train())


@pytest.mark.parametrize("last", [True, False])
def test_the_last_step_and_others_if_asked_are_saved_at_once(
    training: Training, directory: RunDirectory, last: bool
) -> None:
    given: Any = training
    config = debug(directory.path, *([] if last else ["checkpoint.async_save=false"]))
    with closing(Saver(config, directory, given, given)) as saver:
        run(saver.save(10 if last else 9))
    assert directory.checkpoints.steps() == [10 if last else 9]


def test_a_damaged_file_is_an_error_of_the_next_step(training: Training, directory: RunDirectory, saver: Saver) -> None:
    async def train() -> None:
        await saver.save(2)
        await saver.wait()
        await saver.save(4)
        os.truncate(directory.checkpoint_dir / ".step-4.staged/actor/1-0.bin", 999)
        await saver.check()
        for role in training.roles.values():
            role.written = True
        while True:
            await asyncio.sleep(0.01)
            await saver.check()

    with pytest.raises(BrokenCheckpointError, match=r"1-0.bin of actor rank 1 has 999 bytes, not 1000"):
        run(train())
    assert directory.checkpoints.steps() == [2]


def test_a_commit_that_hangs_is_an_error(
    training: Training, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, hangs = cast(Any, training), Event()
    monkeypatch.setattr(directory, "commit", lambda *_: hangs.wait(60))
    config = debug(directory.path, "cluster.time_limits.checkpoint=0.2")
    begun = time.monotonic()

    async def train(saver: Saver) -> None:
        await saver.save(2)
        with pytest.raises(RunError, match=r"step 2 is written, but has not been verified .* in 0\.2 s.*time_limits"):
            await saver.wait()
        await saver.save(4)
        for role in training.roles.values():
            role.written = True
        await asyncio.sleep(0.05)

    with closing(Saver(config, directory, given, given)) as saver:
        run(train(saver))
    assert time.monotonic() - begun < 30
    hangs.set()


def test_an_interrupted_wait_leaves_the_commit_to_the_end(
    directory: RunDirectory, saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = directory.commit

    def slow(*args: Any) -> None:
        time.sleep(0.3)
        commit(*args)

    async def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    async def train() -> None:
        await saver.save(2)
        monkeypatch.setattr(saving.asyncio, "wait", interrupt)
        await saver.wait()

    monkeypatch.setattr(directory, "commit", slow)
    with pytest.raises(KeyboardInterrupt):
        run(train())
    monkeypatch.undo()
    saver.close()
    assert directory.checkpoints.steps() == [2]


def test_what_is_not_written_when_the_run_fails_is_removed(directory: RunDirectory, saver: Saver) -> None:
    run(saver.save(2))
    saver.close()
    directory.close()
    assert list(directory.checkpoint_dir.iterdir()) == []
