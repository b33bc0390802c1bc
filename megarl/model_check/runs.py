"""Runs of ``megarl train`` on a small model: a step of fine-tuning, and steps of GRPO."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megarl.errors import RunError
from megarl.files import read_json, read_lines
from megarl.model_check.small_models import VOCABULARY
from megarl.model_check.training_oracle import OPTIMIZER, Step, Texts, read_weights
from megarl.rewards.completion import Completion
from megarl.types import Layout

LIMIT_S = 900
"""Seconds that a run may take."""
_END_S = 60
"""Seconds that it gets to end."""
_SHOWN_LINES = 12
_LONGEST = 96
"""Tokens of a sequence: more than a chunk of a delta net has."""
_CLUSTER = {"device": "cpu", "devices_per_node": 4, "object_store_mib": 128}


@dataclass(frozen=True, kw_only=True)
class RolloutGaps:
    """Mean absolute differences of log-probabilities between trainer and engine, nats per token.

    Args:
        loaded: difference on random sequences, before the first step.
        sampled: difference on the responses of each step.
        grad_norms: norms of the policy's gradient in each step.
    """

    loaded: float
    sampled: list[float]
    grad_norms: list[float]


def mean_id(completion: Completion) -> float:
    """The score of GRPO's responses, which differs between those of a prompt."""
    return sum(completion.response_ids) / len(completion.response_ids) / VOCABULARY


def fine_tune(model: Path, directory: Path, texts: Texts, layout: Layout) -> Step:
    """Returns the step that a run with this layout takes.

    Raises:
        RunError: the run failed.
    """
    directory.mkdir()
    data = directory / "texts.jsonl"
    with data.open("w") as file:
        for prompt, response in texts:
            file.write(json.dumps({"prompt_ids": prompt, "response_ids": response}) + "\n")
    config = {
        "stage": "sft",
        "run": {"steps": 1, "seed": 0},
        "groups": {"train": _actor(layout)},
        "data": {
            "train": str(data),
            "evaluation": str(data),
            "max_tokens": _LONGEST,
            "sequences_per_step": len(texts),
        },
        "actor": {"optimizer": dict(OPTIMIZER)},
    }
    run = _train(config, model, directory)
    before, after = read_lines(run / "evaluations.jsonl")
    (step,) = read_lines(run / "metrics.jsonl")
    return Step(
        before=before["eval/loss"],
        after=after["eval/loss"],
        grad_norm=step["sft/grad_norm"],
        weights=read_weights(run / "export"),
    )


def roll_out(model: Path, directory: Path) -> RolloutGaps:
    """Returns how far trainers at TP 2 and an engine at TP 1 are apart in three steps of GRPO.

    With so high a learning rate each step changes log-probabilities by far more than rounding.

    Raises:
        RunError: the run failed.
    """
    directory.mkdir()
    config = {
        "stage": "ppo",
        "run": {"steps": 3, "seed": 0},
        "groups": {"train": _actor(Layout(tp=2, sequence_parallel=True))},
        "rollout": {
            "devices": 2,
            "max_new_tokens": 72,
            "max_model_len": _LONGEST,
            "kv_cache_mib": 64,
        },
        "data": {
            "random": {"count": 8, "min_tokens": 4, "max_tokens": 12, "seed": 0},
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
        },
        "algo": {"advantage": "grpo"},
        "resharding": {"logprob_check": {"tokens": _LONGEST, "max_mean_abs_diff": 1e6}},
        "reward": {"functions": [{"name": f"{mean_id.__module__}:{mean_id.__name__}"}]},
        "actor": {"optimizer": {"lr": 1e-2}},
    }
    run = _train(config, model, directory)
    start = read_json(run / "summary.json")["start"]
    steps = read_lines(run / "metrics.jsonl")
    return RolloutGaps(
        loaded=start["sync/logprob_mean_abs_diff"],
        sampled=[step["rollout/logprob_gap"] for step in steps],
        grad_norms=[step["policy/grad_norm"] for step in steps],
    )


def _actor(layout: Layout) -> dict[str, Any]:
    """The settings of a group that has the actor alone."""
    devices = "0"
    if layout.world_size > 1:
        devices = f"0-{layout.world_size - 1}"
    actor = {
        "tp": layout.tp,
        "pp": layout.pp,
        "ep": layout.ep,
        "sequence_parallel": layout.sequence_parallel,
        "tokens_per_micro_batch": _LONGEST,
    }
    return {"devices": devices, "roles": {"actor": actor}}


def _train(config: Mapping[str, Any], model: Path, directory: Path) -> Path:
    """Runs ``megarl train``; returns the run's directory."""
    run = directory / "run"
    file = directory / "config.yaml"
    common = {"model": {"path": str(model)}, "cluster": _CLUSTER}
    named = {**config["run"], "dir": str(run)}
    file.write_text(yaml.safe_dump({**config, **common, "run": named}))
    log = directory / "train.log"
    command = [sys.executable, "-m", "megarl", "train", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w") as output:
        program = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            status = program.wait(LIMIT_S)
            what = f"failed with exit code {status}"
        except subprocess.TimeoutExpired:
            status = None
            what = f"took more than {LIMIT_S} s"
        finally:
            _end(program)
    if status != 0:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:])
        kept = "--keep DIR keeps the files of all runs"
        raise RunError(f"megarl train {file} {what} ({kept}):\n{end}")
    return run


def _end(program: subprocess.Popen[bytes]) -> None:
    """Ends a run that has not ended, and gives it time to end its processes."""
    program.terminate()
    try:
        program.wait(_END_S)
    except subprocess.TimeoutExpired:
        program.kill()
        program.wait()
