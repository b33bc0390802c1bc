"""The debug run, once for all tests that look at it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.runs import Finished, train


@dataclass(frozen=True, kw_only=True)
class DebugRun:
    """The debug run with a checkpoint after its second step too, its directory, and the rollouts that it recorded."""

    finished: Finished
    directory: Path
    recorded: Path


@pytest.fixture(scope="session")
def debug_run(tmp_path_factory: pytest.TempPathFactory) -> DebugRun:
    base = tmp_path_factory.mktemp("debug")
    directory, recorded = base / "run", base / "recorded"
    finished = train(directory, f"rollout.record={recorded}", "checkpoint.every=2")
    return DebugRun(finished=finished, directory=directory, recorded=recorded)
