"""Fixtures that all tests share."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.remote import Producer

from megarl.garbage_collection import importing
from tests.pool import RankPool
from tests.scheduling import GroupScheduling, group, place

os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of one test would wait actively while others have the cores

# Reproducible, and without a time limit per example: the machine may be busy.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.register_profile("unit", settings.get_profile("suite"), max_examples=8)
settings.load_profile("suite")

_PROCESS_MARKS = ("process", "dist", "e2e", "gpu")
_started: list[str] = []
"""The programs that this process started since the current test began."""

_IMPORT_PROGRAMS = ("/sbin/ldconfig", "git")
"""What Triton looks for CUDA's library with, and megatron-core for its commit, when they are first imported."""


def _note_start(event: str, args: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen" and args[0] in _IMPORT_PROGRAMS:
        return
    if event in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"):
        _started.append(f"{event}{args[:2]}")


def _note_spawn(process: BaseProcess) -> None:
    _started.append(repr(process))
    _start_process(process)


sys.addaudithook(_note_start)
_start_process, BaseProcess.start = BaseProcess.start, _note_spawn  # the spawn method raises no audit event


def _guard(item: pytest.Item) -> Generator[None]:
    """Fails a test without one of the marks that starts a process, itself or by a fixture."""
    _started.clear()
    yield
    if _started and not any(map(item.get_closest_marker, _PROCESS_MARKS)):
        pytest.fail(f"Mark the test 'process', as it starts {_started[0]}", pytrace=False)


pytest_runtest_setup = pytest.hookimpl(wrapper=True)(_guard)
pytest_runtest_call = pytest.hookimpl(wrapper=True)(_guard)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Runs long groups first, one group after the other; in a group of several folders, whole runs come last."""

    def order(item: pytest.Item) -> tuple[int, str, bool]:
        file = item.path.relative_to(config.rootpath)
        return place(file), group(file), item.path.parent.name == "e2e"

    items.sort(key=order)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempts what the tests have imported from garbage collections, which would scan it again and again."""
    with importing():
        return (yield)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> GroupScheduling:
    """For ``pytest -n 3 --no-loadscope-reorder``."""
    return GroupScheduling(config, log)


@pytest.fixture
def user_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory of a user's modules, which no other one of the same name hides, as in the repository."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    modules = dict(sys.modules)
    yield tmp_path
    for name in sys.modules.keys() - modules.keys():
        if (sys.modules[name].__dict__.get("__file__") or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Four warm rank processes; they start with the first test that uses them."""
    ranks = RankPool(4)
    yield ranks
    ranks.close()


@pytest.fixture(autouse=True)
def whole_machine(request: pytest.FixtureRequest, pool: RankPool) -> None:
    """Ends the warm processes before a whole run: idle, they take a quarter of a core, as Gloo polls."""
    if request.node.get_closest_marker("e2e") and not request.node.get_closest_marker("dist"):
        pool.close()
