"""Memory stays within the budget."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from megarl.convert.cli import parse_bytes
from megarl.convert.resources import _LATER_BYTES, Resources
from megarl.errors import UsageError
from tests.convert.directories import assert_equal, make_directory, read_directory
from tests.weights import models


@pytest.mark.process
def test_the_least_budget_is_enough(tmp_path: Path) -> None:
    config = models.llama_config(vocab_size=150_001, hidden_size=100)
    tensors = make_directory(tmp_path / "hf", config)
    other = {name: tensor + 1 for name, tensor in tensors.items()}  # every element differs, which takes the most
    make_directory(tmp_path / "other", config, tensors=other)
    for kind, source, out in (("import", "hf", "ckpt"), ("export", "ckpt", "out"), ("verify", "other", "ckpt")):
        command = [sys.executable, "-m", "tests.convert.remembering", kind, str(tmp_path / source), str(tmp_path / out)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)
        budget, peak = json.loads(done.stdout)
        assert peak <= budget, f"{kind}: {(peak - budget) / 2**20:.1f} MiB too much"
    assert_equal(read_directory(tmp_path / "out"), tensors)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("512MiB", 512 << 20), ("4GiB", 4 << 30), ("5GB", 5 * 10**9), ("1.5 KiB", 1536), ("77", 77)]
)
def test_sizes_are_parsed(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "4 gigs", "1e9", "3XB"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=r"'.*' is not a size; write one like"):
        parse_bytes(text)


def test_processes_share_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them counts Python with its libraries and the largest task, and this process Python alone."""
    monkeypatch.setattr("megarl.convert.resources.resident_bytes", lambda: (100 << 20) - _LATER_BYTES)
    tasks = [memory << 20 for memory in (200, 50, 50, 50, 50)]
    found = [Resources(memory=memory << 20, processes=4).workers(tasks) for memory in (300, 699, 700, 1000, 1300, 5000)]
    assert found == [1, 1, 2, 3, 4, 4]
    assert Resources(memory=5000 << 20, processes=4).workers(tasks[:2]) == 2
    with pytest.raises(
        UsageError, match=r"299\.0 MiB is too small: .* 100\.0 MiB, .* 200\.0 MiB; give at least 303\.0"
    ):
        Resources(memory=299 << 20, processes=4).workers(tasks)
