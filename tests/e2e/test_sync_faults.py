"""Faults in a sync from real Megatron ranks into a real engine: one error on all ranks, and never mixed weights."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from megarl.weights.planner import Place
from tests.e2e.syncing import Outcome, Pause, Step, corrupt, die, lose_a_tensor, sync
from tests.leftovers import Trace, comes_true
from tests.pool import RankPool
from tests.rollout import in_process
from tests.rollout.conftest import Answers, ask, start
from tests.rollout.engine_process import EngineProcess, RemoteError
from tests.rollout.models import qwen2, random_model, save
from tests.rollout.oracles import assert_same

pytestmark = [pytest.mark.e2e, pytest.mark.dist]

TP2_PP2: list[str] = []  # of the debug configuration
PLACES = [Place()] * 6


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The engine's model, and another one that is never fully synced."""
    root = tmp_path_factory.mktemp("faulty")
    return [save(random_model(qwen2(kv_heads=4), seed), root / str(seed)) for seed in (1, 2)]


@pytest.fixture(scope="module")
def trace() -> Trace:
    return Trace()


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory, directories: list[Path], trace: Trace) -> Iterator[EngineProcess]:
    """An engine of two ranks."""
    resource_tracker.ensure_running()  # this process's own, which is to stay
    with pytest.MonkeyPatch.context() as patch:
        for name, value in trace.environment().items():
            patch.setenv(name, value)
        process = EngineProcess(tmp_path_factory.mktemp("engine"))
    start(process, directories[0], tp=2)
    yield process
    process.close()


@pytest.fixture(scope="module")
def answers(pool: RankPool, process: EngineProcess, directories: list[Path]) -> Answers:
    """The engine's answers with the first model's weights, version 5."""
    (outcome,) = attempt(pool, process, directories[0], Step(version=5))
    assert [stats.version for stats in outcome.engine if not isinstance(stats, str)] == [5, 5]
    return ask(process)


def attempt(pool: RankPool, process: EngineProcess, directory: Path, *steps: Step) -> list[Outcome]:
    return sync(pool, process, TP2_PP2, directory, *steps, places=PLACES)


def test_a_fault_before_the_first_write_changes_nothing(
    pool: RankPool, process: EngineProcess, answers: Answers, directories: list[Path]
) -> None:
    stale, missing = attempt(pool, process, directories[1], Step(version=4), Step(version=6, faults={2: lose_a_tensor}))
    assert "version 4 is below version 5" in stale.error()
    assert missing.error() == "sync aborted: rank 2: 0:output_layer.weight is missing"
    assert_same(ask(process), answers)
    assert process.apply(in_process.version) == 5


@pytest.mark.parametrize("fault", [corrupt, die])
def test_a_partial_sync_is_never_served(
    pool: RankPool, process: EngineProcess, answers: Answers, directories: list[Path], fault: object
) -> None:
    (outcome,) = attempt(pool, process, directories[1], Step(version=7, faults={1: fault}))  # pyright: ignore[reportArgumentType]
    message = outcome.error()
    if fault is corrupt:
        assert "the message from rank 1 for bucket " in message
        assert "is corrupt: model." in message
    else:
        assert outcome.trainers[1] is None
        assert "rank 1" in message.split(":", 2)[2], message
    with pytest.raises(RemoteError, match="a weight sync failed half-way; sync again before using it"):
        ask(process)
    attempt(pool, process, directories[0], Step(version=7))
    assert_same(ask(process), answers)


@pytest.mark.usefixtures("answers")
def test_a_death_in_the_engine_aborts_the_sync_and_leaves_no_process(
    pool: RankPool, process: EngineProcess, directories: list[Path], trace: Trace, tmp_path: Path
) -> None:
    (_, second), _ = process.apply(in_process.processes_and_shared_memory)
    pause = Pause(begun=tmp_path / "begun", over=tmp_path / "over")

    def kill() -> None:
        while not pause.begun.exists():
            time.sleep(0.01)
        os.kill(second, signal.SIGKILL)
        pause.over.touch()

    (outcome,) = sync(
        pool, process, TP2_PP2, directories[1], Step(version=8, faults={0: pause}), places=PLACES, during=kill
    )
    (message,) = set(map(str, outcome.trainers))
    assert message.startswith("sync aborted: rank ")
    assert "rank 5" in message.split(":", 2)[2], message
    with pytest.raises(RemoteError):
        ask(process)
    process.close()
    assert comes_true(lambda: not trace.processes()), trace.processes()
