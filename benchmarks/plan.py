"""Planning the weights of a dense 405B model and of a 235B mixture of experts into 512 engine ranks, on one core.

    python -m benchmarks.plan [--rollout tp=8,replicas=64]

Each is planned with ``megarl plan weights`` in a process of its own: its time from start to end and its largest memory.
The aim is 10 s and 4 GiB each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 1 << 30

LLAMA_405B: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
QWEN3_235B_A22B: Mapping[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
CASES = (
    ("Llama 405B", LLAMA_405B, "tp=8,pp=16,dp=4"),
    ("Qwen3-235B-A22B", QWEN3_235B_A22B, "tp=4,pp=8,dp=16,ep=8"),
)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a process took: seconds by the clock and of processors, and its largest memory (bytes)."""

    wall: float
    cpu: float
    memory: int


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollout", default="tp=8,replicas=64", help="the engines; the aim is for 512 ranks")
    rollout = parser.parse_args(arguments).rollout
    columns = ("process", "of CPU", "planning", "memory", "messages", "bytes", "redundancy")
    print(f"{'':42}" + "".join(f"{column:>12}" for column in columns))
    for name, config, train in CASES:
        report, cost = measured(config, train, rollout)
        cells = (
            f"{cost.wall:.1f} s",
            f"{cost.cpu:.1f} s",
            f"{report['plan_seconds']:.1f} s",
            f"{cost.memory / GIB:.2f} GiB",
            f"{report['messages']:,}",
            f"{report['nbytes'] / GIB:,.0f} GiB",
            f"{report['redundancy']:.4f}",
        )
        print(f"{f'{name}, {train}':42}" + "".join(f"{cell:>12}" for cell in cells))
    print(f"into {rollout}; buckets of 256 MiB; aim: below 10 s and 4 GiB")


def measured(config: Mapping[str, Any], train: str, rollout: str) -> tuple[dict[str, Any], Cost]:
    """What ``megarl plan weights`` says in a fresh process that is kept on one core, and what that took."""
    core = {min(os.sched_getaffinity(0))}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.json"
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", "megarl", "plan", "weights", "--hf", str(path)]
        command += ["--train", train, "--rollout", rollout, "--json"]
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=lambda: os.sched_setaffinity(0, core))
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
    if status:
        sys.exit(f"megarl plan weights ended with status {status}")
    cost = Cost(wall=wall, cpu=usage.ru_utime + usage.ru_stime, memory=usage.ru_maxrss << 10)
    return json.loads(output), cost


if __name__ == "__main__":
    main(sys.argv[1:])
