"""Memory stays within the budget for models that are much larger."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.convert.resources import Resources, parse_bytes, resident_bytes
from megarl.errors import UsageError
from tests.convert.directories import assert_equal, make_directory, read_directory
from tests.convert.remembering import BUDGET_BYTES
from tests.weights import models


@pytest.mark.process
def test_a_model_larger_than_the_budget_is_converted_within_it(tmp_path: Path) -> None:
    tensors = make_directory(tmp_path / "hf", models.llama_config(vocab_size=150_001, hidden_size=100))
    assert sum(tensor.nbytes for tensor in tensors.values()) > 4 * BUDGET_BYTES
    other = {name: tensor + 1 for name, tensor in tensors.items()}  # every element differs, which takes the most
    make_directory(tmp_path / "other", models.llama_config(vocab_size=150_001, hidden_size=100), tensors=other)
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
    assert parse_bytes("--max-file-size", text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "4 gigs", "1e9", "3XB"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--memory-budget '.*' is not a size; write one like"):
        parse_bytes("--memory-budget", text)


def test_processes_share_the_budget() -> None:
    alone = Resources(memory=resident_bytes() + (58 << 20), processes=1).block_bytes(1, 1 << 20)
    shared = Resources(memory=5 * resident_bytes() + (90 << 20), processes=4).block_bytes(1, 1 << 20)
    assert 9 << 20 <= alone <= 10 << 20
    assert 2 << 20 <= shared <= 3 << 20
    with pytest.raises(UsageError, match=r"give at least .*iB, or fewer --processes"):
        Resources(memory=resident_bytes() + (58 << 20), processes=4).block_bytes(1, 1 << 20)


def test_the_budget_includes_the_plan_of_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured: 17 thousand blocks took 25 MiB, a thousand 5 MiB; each may take 5 KiB."""
    monkeypatch.setattr(
        "megarl.convert.resources.resident_bytes", lambda: 0
    )  # more and more here, and sizes are rounded
    small, large = (
        Resources(memory=308 << 20, processes=1).block_bytes(100, nbytes) for nbytes in (1 << 30, 800 << 30)
    )
    assert 59 << 20 <= small <= 60 << 20
    count = (800 << 30) / large
    assert 290 << 20 <= 5 * large + count * (5 << 10) <= 300 << 20
    with pytest.raises(UsageError, match=r"give at least (\d+\.\d) MiB") as caught:
        Resources(memory=200 << 20, processes=1).block_bytes(100, 800 << 30)
    assert 280 << 20 <= parse_bytes("", str(caught.value).split("give at least ")[1]) <= 300 << 20
