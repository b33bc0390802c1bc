"""Times and memory of a debug run, from a process that watches it: seconds by stage, and the largest memory at once.

    python -m benchmarks.debug_run [CONFIG] [key.path=value ...] [-- key.path=value ...] [-- ...]

CONFIG is configs/debug/ppo.yaml by default. After each ``--`` come the settings of one of several runs; the first ones
are those of all runs. Threads side by side, with a model of 27 million parameters, on a machine that does nothing else:

    python -m benchmarks.debug_run configs/debug/grpo.yaml evaluation=null run.steps=3 cluster.devices_per_node=1 \
        groups.train.devices=0 groups.train.roles.actor='{tp: 1, recompute: none, tokens_per_micro_batch: 1024}' \
        groups.train.roles.reference='{tokens_per_micro_batch: 1024}' rollout.sleep=false rollout.kv_cache_mib=512 \
        rollout.max_new_tokens=128 rollout.max_model_len=160 data.prompts_per_step=8 data.samples_per_prompt=8 \
        model.random.config.{hidden_size=512,intermediate_size=1536,num_hidden_layers=8,max_position_embeddings=256} \
        -- cluster.threads_per_device=1 -- cluster.threads_per_device=auto

Memory is the proportional set size (PSS) of every process of the run: what several share is counted once.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import groupby
from pathlib import Path

CONFIG = Path(__file__).parents[1] / "configs/debug/ppo.yaml"
MARK = "MEGARL_BENCHMARK"
INTERVAL_S = 0.5


def main(arguments: list[str]) -> None:
    config = arguments.pop(0) if arguments and "=" not in arguments[0] else str(CONFIG)
    common, *variants = [[*group] for ends, group in groupby(arguments, "--".__eq__) if not ends] or [[]]
    for own in variants or [[]]:
        print(" ".join(own) or config)
        measure(config, [*common, *own])


def measure(config: str, overrides: list[str]) -> None:
    mark = secrets.token_hex(8)
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        command = [sys.executable, "-m", "megarl", "train", config, f"run.dir={run_dir}", *overrides]
        start = time.perf_counter()
        run = subprocess.Popen(command, env={**os.environ, MARK: mark}, stdout=subprocess.DEVNULL)
        largest: Counter[str] = Counter()
        while run.poll() is None:
            memory = memory_by_kind(mark)
            if memory.total() > largest.total():
                largest = memory
            time.sleep(INTERVAL_S)
        seconds = time.perf_counter() - start
        if run.returncode:
            sys.exit(f"the run ended with status {run.returncode}")
        steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    report(seconds, steps, largest)


def report(seconds: float, steps: list[dict[str, float]], memory: Counter[str]) -> None:
    in_steps = sum(step["time/step"] for step in steps)
    print(f"whole run        {seconds:7.1f} s, of which {in_steps:.1f} s in {len(steps)} steps")
    for stage in ("rollout", "experience", "update", "sync"):
        times = ", ".join(f"{step[f'time/{stage}']:.3f}" for step in steps)
        print(f"  {stage:14} {times} s")
    speeds = ", ".join(f"{step['perf/rollout_tokens_per_second']:.0f}" for step in steps)
    print(f"rollout          {speeds} tokens/s")
    print(f"largest memory   {memory.total():7.0f} MiB")
    for kind, mib in memory.most_common():
        print(f"  {kind:14} {mib:7.0f} MiB")


def memory_by_kind(mark: str) -> Counter[str]:
    """MiB of the living processes with the mark in their environment."""
    kinds: Counter[str] = Counter()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if f"{MARK}={mark}".encode() not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            pss = next(line for line in (entry / "smaps_rollup").read_text().splitlines() if line.startswith("Pss:"))
        except (OSError, StopIteration):
            continue  # it has ended meanwhile
        kinds[kind_of(words)] += int(pss.split()[1]) // 1024
    return kinds


def kind_of(command: str) -> str:
    if "megarl train" in command:
        return "driver"
    if "RayWorker" in command:
        return "ranks, engines"
    return "vLLM workers" if "VLLM" in command else "Ray"


if __name__ == "__main__":
    main(sys.argv[1:])
