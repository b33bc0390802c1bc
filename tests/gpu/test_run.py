"""Whole runs on the GPU: trainer and engine take turns, checkpoints are written, and the model is exported."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu.work import SIZES, config, figures
from tests.gpu.conftest import has_transformer_engine

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("layers", ["local", "transformer_engine"])
def test_a_run_of_each_kind_of_layers(cuda: str, tmp_path: Path, layers: str) -> None:
    """The run refuses to start if trainer and engine disagree; the difference is that of bfloat16."""
    if layers == "transformer_engine" and not has_transformer_engine():
        pytest.skip("needs Transformer Engine")
    size = replace(SIZES["tiny"], heads=2, kv_heads=1, dtype="bfloat16")
    file, directory = tmp_path / "run.json", tmp_path / "run"
    fields = config(directory, size, cuda, steps=4, layers=layers, sleep=True)
    file.write_text(json.dumps({**fields, "checkpoint": {"every": 2}}))
    subprocess.run([sys.executable, "-m", "megarl", "train", str(file)], check=True, timeout=500)
    assert figures(directory)["rollout/logprob_gap"] < 0.05
    assert {path.name for path in (directory / "checkpoints").iterdir()} == {"step-2", "step-4"}
    assert list((directory / "export").glob("*.safetensors"))
