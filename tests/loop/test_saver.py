"""Checkpoints that are written while the training goes on: what is saved, when it counts, and how it fails."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
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
from tests.checkpoint.staging import write_role
from tests.run.test_directory import debug


class Answer:
    """A call of some ranks; `then` is for the monitor to call."""

    def __init__(self, results: list[Any]) -> None:
        self._results = results
        self.finished = False
        self.then: Callable[[], None] | None = None

    def wait(self) -> list[Any]:
        self.finished = True
        return self._results


class Ranks:
    """Two ranks of a role; the second one has written what it saves in the background when it is told."""

    def __init__(self, name: str) -> None:
        self.name, self.written = name, False
        self.calls: list[Answer] = []

    def call(self, method: Any, *args: Any, **options: Any) -> Answer:
        if method.name == "save":
            self._records = write_role(Path(args[0]), 2)
            self.written = not options["in_background"]
        else:
            self.written |= options["wait"]
        last = [None] if not self.written else self._records[1:]
        self.calls.append(Answer([*self._records[:1], *last]))
        return self.calls[-1]


class Training:
    """A trainer with two roles, and the monitor of its calls."""

    def __init__(self) -> None:
        self.roles = {name: Ranks(name) for name in ("actor", "critic")}
        self.listeners: list[Callable[[], None]] = []
        self.position: dict[str, Any] = {"taken": [1, 2]}

    def to_training(self) -> None:
        pass

    def state(self, directory: Path) -> dict[str, Any]:
        directory.mkdir()
        (directory / "step-3").write_text(f"{self.position}")
        return self.position

    def go_on(self) -> None:
        """The driver waits for something, as in a step."""
        for listener in self.listeners:
            listener()
        for role in self.roles.values():
            for call in role.calls:
                call.finished = True
                if call.then is not None:
                    call.then()
            role.calls.clear()


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Training:
    monkeypatch.setattr(saving, "_INTERVAL_S", 0.0)
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


def until(happened: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_checkpoint_counts_when_all_ranks_have_written(
    training: Training, directory: RunDirectory, saver: Saver
) -> None:
    """Nobody asks for it; the driver's state is that of the save."""
    saver.save(2)
    training.position["taken"].append(3)
    training.roles["actor"].written = True
    for _ in range(3):
        training.go_on()
        saver.check()
    assert (directory.checkpoints.steps(), directory.checkpoints.staged_step()) == ([], 2)
    training.roles["critic"].written = True
    training.go_on()
    until(directory.checkpoints.steps)
    saver.check()
    latest = directory.checkpoints.latest()
    assert latest is not None
    assert (latest.step, latest.state, latest.roles) == (2, {"taken": [1, 2]}, ("actor", "critic"))
    assert (latest.path / "rollouts/step-3").read_text() == "{'taken': [1, 2]}"


def test_a_save_waits_for_the_one_before(training: Training, directory: RunDirectory, saver: Saver) -> None:
    saver.save(2)
    assert directory.checkpoints.steps() == []
    saver.save(4)
    assert (directory.checkpoints.steps(), directory.checkpoints.staged_step()) == ([2], 4)
    saver.wait()
    assert (directory.checkpoints.steps(), directory.checkpoints.staged_step()) == ([2, 4], None)
    saver.wait()


@pytest.mark.parametrize("last", [True, False])
def test_the_last_step_and_others_if_asked_are_saved_at_once(
    training: Training, directory: RunDirectory, last: bool
) -> None:
    given: Any = training
    config = debug(directory.path, *([] if last else ["checkpoint.async_save=false"]))
    with closing(Saver(config, directory, given, given)) as saver:
        saver.save(10 if last else 9)
    assert directory.checkpoints.steps() == [10 if last else 9]


def test_a_damaged_file_is_an_error_of_the_next_step(training: Training, directory: RunDirectory, saver: Saver) -> None:
    saver.save(2)
    saver.wait()
    saver.save(4)
    os.truncate(directory.checkpoint_dir / ".step-4.staged/actor/1-0.bin", 999)
    saver.check()
    for role in training.roles.values():
        role.written = True
    training.go_on()
    with pytest.raises(BrokenCheckpointError, match=r"1-0.bin of actor rank 1 has 999 bytes, not 1000"):
        until(saver.check)
    assert directory.checkpoints.steps() == [2]


def test_a_commit_that_hangs_is_an_error(
    training: Training, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, hangs = cast(Any, training), Event()
    monkeypatch.setattr(directory, "commit", lambda *_: hangs.wait(60))
    config = debug(directory.path, "cluster.time_limits.checkpoint=0.2")
    begun = time.monotonic()
    with closing(Saver(config, directory, given, given)) as saver:
        saver.save(2)
        with pytest.raises(RunError, match=r"step 2 is written, but has not been verified .* in 0\.2 s.*time_limits"):
            saver.wait()
        saver.save(4)
        for role in training.roles.values():
            role.written = True
        training.go_on()
    assert time.monotonic() - begun < 30
    hangs.set()


def test_an_interrupted_wait_leaves_the_commit_to_the_end(
    training: Training, directory: RunDirectory, saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, waits = directory.commit, saving.wait

    def slow(*args: Any) -> None:
        time.sleep(0.3)
        commit(*args)

    def interrupt(*_: object) -> None:
        monkeypatch.setattr(saving, "wait", waits)
        raise KeyboardInterrupt

    monkeypatch.setattr(directory, "commit", slow)
    monkeypatch.setattr(saving, "wait", interrupt)
    saver.save(2)
    with pytest.raises(KeyboardInterrupt):
        saver.wait()
    saver.close()
    assert directory.checkpoints.steps() == [2]


def test_what_is_not_written_when_the_run_fails_is_removed(directory: RunDirectory, saver: Saver) -> None:
    saver.save(2)
    saver.close()
    directory.close()
    assert list(directory.checkpoint_dir.iterdir()) == []
