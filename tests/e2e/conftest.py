"""The debug run, shared by all tests that read its results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.runs import PARTS, Finished, train


@dataclass(frozen=True, kw_only=True)
class DebugRun:
    """The debug run with further parts, its second step profiled and saved; its directory, and what it recorded."""

    finished: Finished
    directory: Path
    recorded: Path


@pytest.fixture(scope="session")
def debug_run(tmp_path_factory: pytest.TempPathFactory) -> DebugRun:
    base = tmp_path_factory.mktemp("debug")
    directory, recorded = base / "run", base / "recorded"
    settings = (f"rollout.record={recorded}", "checkpoint.every=2", "profile.steps=[2]", *PARTS)
    finished = train(directory, *settings, writes_model=True)
    return DebugRun(finished=finished, directory=directory, recorded=recorded)
