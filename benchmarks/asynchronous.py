"""Asynchronous training against the synchronous loop, with the trainer on one core and the engine on another.

    python -m benchmarks.asynchronous [--load even] [--steps 16] [--repetitions 1] [key.path=value ...]

A small random model is trained with GRPO. In every repetition each way of training runs once, one after the other; the
table has medians, and medians of the ratios within a repetition. The loads:

- even: responses of equal lengths, whose generation takes about as long as the training;
- lengths: every token ends its response with the same probability, so that a few responses are long;
- rewards: equal lengths, and a reward function that sleeps from 0.5 to 4 s for each response;
- passes: lengths as above, with a critic and a reference, which have a device of their own;
- conversations: four turns of about 32 tokens, with an environment that sleeps from 1 to 5 s after each.

Processes compute with one thread each. Seconds are those of all steps, the first included, which fills the pipeline;
the idle fraction of the engine is that of the steps without their first and last quarter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from examples.sort_letters.checkpoint import tokenizer
from megarl.environments.environment import Action, Environment, EnvironmentTask, Observation
from megarl.rewards.functions import Completion

ROOT = Path(__file__).parents[1]
SLEEP_S, TOOL_S = (0.5, 4.0), (1.0, 5.0)
SETTINGS: Mapping[str, Any] = {
    "defaults": [str(ROOT / "configs/debug/base.yaml")],
    "stage": "ppo",
    "run": {"seed": 1},
    "model": {"random": {"config": {"hidden_size": 256, "intermediate_size": 768, "max_position_embeddings": 512}}},
    "cluster": {"devices_per_node": 2},
    "groups": {"train": {"devices": 0, "roles": {"actor": {"tokens_per_micro_batch": 2048}}}},
    "rollout": {"devices": 1, "max_model_len": 512, "kv_cache_mib": 256},
    "data": {"random": {"count": 256, "min_tokens": 4, "max_tokens": 16, "seed": 0}},
    "algo": {"advantage": "grpo", "correction": {"weights": {"name": "token_mask", "upper": 5.0}}},
    "actor": {"optimizer": {"lr": 1.0e-6, "betas": [0.9, 0.95]}},
    "reward": {"functions": [{"name": "benchmarks.asynchronous:tokens"}]},
    "resharding": {"logprob_check": None},
    "tracking": {"samples": 0, "tensorboard": False},
}
EXACT = ["rollout.max_staleness=1"]
BOUNDED = ["rollout.max_staleness=4", "rollout.mode=bounded"]
INFLIGHT = ["rollout.max_staleness=4", "rollout.mode=inflight"]
TWO = "rollout.max_staleness=2"
PARTS = ["rollout.inference_parts=8"]
SLOW = "reward={processes: 8, functions: [{name: 'benchmarks.asynchronous:slow_tokens'}]}"


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is sampled, scored and trained on, and the ways of training that are compared with the synchronous one.

    Args:
        talks: it needs a tokenizer.
    """

    overrides: Sequence[str]
    ways: Mapping[str, Sequence[str]]
    talks: bool = False


EIGHT = "data={prompts_per_step: 2, samples_per_prompt: 4}"
EQUAL = [EIGHT, "rollout={ignore_eos: true, max_new_tokens: 448}"]
LOADS: Mapping[str, Load] = {
    "even": Load(overrides=EQUAL, ways={"exact, 1": EXACT}),
    "lengths": Load(
        overrides=[EIGHT, "rollout.max_new_tokens=480"],
        ways={"exact, 1": EXACT, "bounded, 4": BOUNDED, "inflight, 4": INFLIGHT},
    ),
    "rewards": Load(
        overrides=[*EQUAL, SLOW],
        ways={"exact, 1": EXACT, "bounded, 4": BOUNDED, "inflight, 4": INFLIGHT},
    ),
    "passes": Load(
        overrides=[
            "data={prompts_per_step: 8, samples_per_prompt: 4}",
            "rollout.max_new_tokens=480",
            "cluster.devices_per_node=3",
            "groups.values.devices=2",
            "groups.values.roles={critic: {tokens_per_micro_batch: 2048}, reference: {tokens_per_micro_batch: 2048}}",
            "algo={advantage: gae, kl: {in: reward, estimator: k1, coef: 0.05}}",
            "critic.optimizer={lr: 1.0e-6, betas: [0.9, 0.95]}",
        ],
        ways={"8 parts": PARTS, "exact, 1": EXACT, "1, 8 parts": [*EXACT, *PARTS]},
    ),
    "conversations": Load(
        overrides=[
            "data={random: null, tasks: 1000, prompts_per_step: 8, samples_per_prompt: 4}",
            "environment={name: 'benchmarks.asynchronous:SlowTool'}",
            "reward.functions=[]",
            "model.vocab_size=99",
            "rollout={max_new_tokens: 160, stop_token_ids: [4, 5]}",
        ],
        ways={"exact, 1": EXACT, "bounded, 2": [*BOUNDED, TWO], "inflight, 2": [*INFLIGHT, TWO]},
        talks=True,
    ),
}
SYNCHRONOUS = "synchronous"


def tokens(completion: Completion) -> float:
    """The share of even ids."""
    return sum(token % 2 for token in completion.response_ids) / len(completion.response_ids)


def slow_tokens(completion: Completion) -> float:
    """The same after a while, which follows from the response; most are short."""
    shortest, longest = SLEEP_S
    chance = random.Random(repr((completion.prompt_id, completion.response_ids)))
    time.sleep(shortest * (longest / shortest) ** chance.random())
    return tokens(completion)


class SlowTool(Environment):
    """Asks four times, and sleeps before each answer."""

    def reset(self, task: EnvironmentTask, seed: int) -> str:
        self._random, self._left = random.Random(seed), 4
        return "ask: "

    async def step(self, action: Action) -> Observation:
        await asyncio.sleep(self._random.uniform(*TOOL_S))
        self._left -= 1
        vowels = sum(letter in "aeiou" for letter in action.text)
        return Observation(messages=" more: ", reward=vowels / 10, done=self._left == 0)


Step = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Times:
    """What the steps of a run took, s per step.

    Args:
        training: forward passes, as far as they wait for no response or score, and updates.
        syncing: the transfer of the weights.
        age: mean age of the tokens, versions.
        oldest: the largest one.
        idle: the engine's idle fraction.
    """

    step: float
    training: float
    syncing: float
    age: float
    oldest: float
    idle: float

    @property
    def waiting(self) -> float:
        """The rest: the trainers wait for responses or scores."""
        return self.step - self.training - self.syncing

    @classmethod
    def of(cls, steps: Sequence[Step]) -> Times:
        def mean(name: str) -> float:
            return sum(step.get(name, 0.0) for step in steps) / len(steps)

        quarter = len(steps) // 4
        middle = steps[quarter : len(steps) - quarter]
        return cls(
            step=mean("time/step"),
            training=sum(min(step["time/logprobs"], step["time/experience"]) for step in steps) / len(steps)
            + mean("time/update"),
            syncing=mean("sync/seconds"),
            age=mean("staleness/mean"),
            oldest=max(step["staleness/max"] for step in steps),
            idle=sum(step["rollout/engine_idle"] * step["time/step"] for step in middle)
            / sum(step["time/step"] for step in middle),
        )


def run(overrides: Sequence[str], steps: int) -> Times:
    """Trains once, in a directory of its own."""
    with tempfile.TemporaryDirectory() as directory:
        config, run_dir = Path(directory, "run.yaml"), Path(directory, "run")
        config.write_text(yaml.safe_dump(dict(SETTINGS)))
        arguments = [str(config), f"run={{dir: {run_dir}, steps: {steps}}}", *overrides]
        command = [sys.executable, "-m", "megarl", "train", *arguments]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
        if done.returncode:
            sys.exit(f"the run ended with status {done.returncode}: megarl train {' '.join(arguments)}")
        return Times.of([json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()])


def measure(load: Load, overrides: Sequence[str], steps: int, repetitions: int) -> Mapping[str, Sequence[Times]]:
    """Runs every way of training once in each repetition."""
    ways = {SYNCHRONOUS: (), **load.ways}
    with tempfile.TemporaryDirectory() as directory:
        tokenizer().save_pretrained(directory)
        shared = [*load.overrides, *([f"model.tokenizer={directory}"] if load.talks else []), *overrides]
        rounds = [{name: run([*shared, *own], steps) for name, own in ways.items()} for _ in range(repetitions)]
    return {name: [times[name] for times in rounds] for name in ways}


def report(name: str, measured: Mapping[str, Sequence[Times]]) -> None:
    for way, runs in measured.items():
        seconds = (f"{median(getattr(times, field) for times in runs):.2f} s" for field in ("step", "waiting"))
        training, syncing = (median(getattr(times, field) for times in runs) for field in ("training", "syncing"))
        share = median(times.syncing / times.step for times in runs)
        gains = sorted(first.step / times.step for first, times in zip(measured[SYNCHRONOUS], runs, strict=True))
        ages = f"{median(times.age for times in runs):.1f}, {max(times.oldest for times in runs):g}"
        cells = (
            *seconds,
            f"{training:.2f} s",
            f"{syncing * 1000:.0f} ms",
            f"{share:.1%}",
            f"{median(times.idle for times in runs):.1%}",
            ages,
            f"{median(gains):.2f}" + (f" ({gains[0]:.2f} to {gains[-1]:.2f})" if len(gains) > 1 else ""),
        )
        print(f"{name:15}{way:14}" + "".join(f"{cell:>11}" for cell in cells), flush=True)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", choices=LOADS, action="append", help="all of them without this")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings of all runs")
    options = parser.parse_args(arguments)
    columns = ("step", "waiting", "training", "sync", "share", "idle", "age, max", "gain")
    print(f"{'load':15}{'mode, age':14}" + "".join(f"{column:>11}" for column in columns))
    for name in options.load or LOADS:
        report(name, measure(LOADS[name], options.overrides, options.steps, options.repetitions))


if __name__ == "__main__":
    main(sys.argv[1:])
