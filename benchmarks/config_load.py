"""How long a new process takes to load and check the debug configuration, imports included."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "debug" / "ppo.yaml"
RUNS = 5


def seconds() -> float:
    """Wall time of one process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"from megarl.config import load; load({str(CONFIG)!r})"], check=True)
    return time.perf_counter() - start


if __name__ == "__main__":
    print(
        f"load and check a configuration: {statistics.median(seconds() for _ in range(RUNS)):.2f} s (median of {RUNS})"
    )
