"""What training on kept sets changes: the ratio of unchanged weights, and the bytes and seconds that it costs.

    python -m benchmarks.kept_sets OUT [--steps 5]

Runs of GRPO start from the fine-tuned model of `benchmarks.learning`, with all tokens and with each way to keep a part
of them. Of each run's first step, transformers computes the log-probabilities over all tokens, which are those of a
trainer without the kept sets; the run itself reports its own. OUT/results.json has the table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.learning.training import DIRECTORY, share

SETTINGS: dict[str, list[str]] = {
    "all tokens": [],
    "top_p 0.8": ["rollout.top_p=0.8"],
    "top_k 20": ["rollout.top_k=20"],
    "min_p 0.05": ["rollout.min_p=0.05"],
}
_CONFIG = "configs/learning/grpo.yaml"
_SCORE = [
    "groups.train.roles.reward=null",
    "reward={path: null, functions: [{name: examples.sort_letters.task:exact_match}]}",
    "rollout.temperature=1.0",
]
_OFF = 0.1


def run(directory: Path, steps: int, overrides: Sequence[str]) -> list[dict[str, float]]:
    """Returns the metrics of the steps of a run; what its engines sampled is in DIRECTORY/rollouts."""
    command = [sys.executable, "-m", "megarl", "train", _CONFIG, f"run.dir={directory}", f"run.steps={steps}"]
    command += [f"rollout.record={directory}/rollouts", "evaluation=null", *_SCORE, *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def ratios_of_all_tokens(model: Any, rollouts: Path) -> Iterator[np.ndarray]:
    """Yields the ratios of each response of the first step."""
    import torch

    for file in sorted(rollouts.glob("1%2F*.npz")):
        sample = np.load(file)
        prompt, response = sample["prompt_ids"], sample["response_ids"]
        ids = torch.from_numpy(np.concatenate([prompt, response])).long()
        with torch.no_grad():
            logprobs = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        own = logprobs.gather(-1, ids[len(prompt) :, None])[:, 0].double().numpy()
        yield np.exp(own - sample["rollout_logprobs"])


def main(arguments: Sequence[str] | None = None) -> None:
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(prog="python -m benchmarks.kept_sets", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args(arguments)
    share("sft")
    model = AutoModelForCausalLM.from_pretrained(DIRECTORY / "sft/export").eval()
    table: dict[str, dict[str, float]] = {}
    for name, overrides in SETTINGS.items():
        directory = given.out.absolute() / name.replace(" ", "-")
        steps = run(directory, given.steps, overrides)
        ratios = np.concatenate([*ratios_of_all_tokens(model, directory / "rollouts")])
        later = steps[1:]
        kept = steps[0].get("rollout/kept_ids")
        table[name] = {
            "ratio over all tokens": float(ratios.mean()),
            "off by more than 10 %": float((abs(ratios - 1) > _OFF).mean()),
            "mean of exp(abs(d)) in the run": steps[0]["rollout_corr/mult_prob_error"],
            "bytes of a token": 4 if kept is None else 8 + 4 * kept,
            "seconds of rollouts": median(step["time/rollout"] for step in later),
            "seconds of an update": median(step["time/update"] for step in later),
        }
        print(name, json.dumps(table[name]), flush=True)
    (given.out / "results.json").write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
