"""The map of Megatron's parameters against Megatron-Bridge, an independent program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.convert.bridge_comparison import BRIDGES
from tests.needs import lacking

ROOT = Path(__file__).parents[2]


@pytest.mark.matrix
@pytest.mark.process
@pytest.mark.parametrize("bridge", BRIDGES)
def test_names_and_values_are_those_of_megatron_bridge(bridge: str) -> None:
    packages = list((ROOT / ".venv-bridge/lib").glob("python3*/site-packages"))
    if not packages:
        lacking("make bridge installs Megatron-Bridge")
    path = os.pathsep.join([str(ROOT), *map(str, packages)])
    command = [sys.executable, "-m", "tests.convert.bridge_comparison", bridge]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
