"""How long a new process takes to load and check the debug configuration, imports included.

python -m benchmarks.config_load [--runs 5]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "debug" / "ppo.yaml"


def seconds() -> float:
    """Wall time of one process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"from megarl.config import load; load({str(CONFIG)!r})"], check=True)
    return time.perf_counter() - start


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args(arguments).runs
    median = statistics.median(seconds() for _ in range(runs))
    print(f"load and check a configuration: {median:.2f} s (median of {runs})")


if __name__ == "__main__":
    main(sys.argv[1:])
