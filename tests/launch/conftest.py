"""Fixtures of the launchers' tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.slurm_command import Login, login_node


@pytest.fixture
def login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Login:
    """A login node whose sbatch accepts every job."""
    node = login_node(tmp_path, monkeypatch)
    node.give_sbatch()
    return node
