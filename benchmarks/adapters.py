"""Training all weights against training adapters, in synchronous runs of GRPO: seconds of steps, updates and syncs.

    python -m benchmarks.adapters [--rounds 2] [--steps 5] [--hidden 1024] [--layers 8] [--rank 16]

Each round runs the variants in turn. Figures are medians over the steps of all rounds, but for the first of each run;
ratios are those to training all weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

CONFIG = Path(__file__).parents[1] / "configs/debug/grpo.yaml"
COMMON = (
    "evaluation=null",
    "cluster.devices_per_node=1",
    "cluster.threads_per_device=auto",
    "groups.train.devices=0",
    "groups.train.roles.actor={tp: 1, recompute: none, tokens_per_micro_batch: 512}",
    "groups.train.roles.reference={tokens_per_micro_batch: 512}",
    "rollout.sleep=false",
    "rollout.max_new_tokens=64",
    "rollout.max_model_len=96",
)
METRICS = {
    # metric: column, digits
    "time/step": ("step s", 3),
    "time/update": ("update s", 3),
    "sync/seconds": ("sync s", 4),
    "sync/bytes": ("sync MiB", 2),
}
MIB = 1 << 20


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="at least two")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args(arguments)
    sizes = {
        "hidden_size": options.hidden,
        "intermediate_size": 11 * options.hidden // 4,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.hidden // 64,
        "num_key_value_heads": options.hidden // 64,
    }
    common = [*COMMON, f"run.steps={options.steps}"]
    common += [f"model.random.config.{name}={size}" for name, size in sizes.items()]
    adapters = f"actor.lora={{rank: {options.rank}}}"
    variants = {
        "all weights": [],
        "adapters, merged": [adapters],
        "adapters, separate": [adapters, "resharding.adapters=separate"],
    }
    steps: dict[str, list[dict[str, float]]] = defaultdict(list)
    for _ in range(options.rounds):
        for name, overrides in variants.items():
            steps[name] += steps_of_run([*common, *overrides])[1:]
    report(steps)


def steps_of_run(overrides: Sequence[str]) -> list[dict[str, float]]:
    """Returns the metrics of a run's steps."""
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        command = [sys.executable, "-m", "megarl", "train", str(CONFIG), f"run.dir={run_dir}", *overrides]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def report(steps: dict[str, list[dict[str, float]]]) -> None:
    """Prints a row for each variant."""
    header = f"{'':20}"
    for column, _ in METRICS.values():
        header += f"{column:>10}{'ratio':>8}"
    print(header)
    first: dict[str, float] = {}
    for name, its_steps in steps.items():
        row = f"{name:20}"
        for metric, (_, digits) in METRICS.items():
            value = median(step[metric] for step in its_steps)
            if metric == "sync/bytes":
                value /= MIB
            base = first.setdefault(metric, value)
            row += f"{value:10.{digits}f}{value / base:8.3f}"
        print(row)


if __name__ == "__main__":
    main(sys.argv[1:])
