"""Fixtures of the launchers' tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.slurm_command import Login, login_node


@pytest.fixture
def directory() -> Iterator[Path]:
    """A temporary directory whose path leaves room for the names of sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="nodes-") as path:
        yield Path(path)


@pytest.fixture
def login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Login:
    """A login node whose sbatch accepts every job."""
    node = login_node(tmp_path, monkeypatch)
    node.give_sbatch()
    return node
