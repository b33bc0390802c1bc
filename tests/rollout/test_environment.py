"""Where an engine's process keeps its files."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from megarl.rollout.vllm_environment import scratch_directory

ROOM = 107 - 37


@pytest.mark.parametrize("length", [10, 45, 46, 90])
def test_the_names_of_vllms_sockets_find_room(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="") as short:
        usual = Path(short, "t" * max(length - len(short) - 1, 0))
        usual.mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(usual))
        with scratch_directory() as directory:
            assert len(directory) <= ROOM
            assert (Path(directory).parent == usual) == (len(str(usual)) <= 45)
