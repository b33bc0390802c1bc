"""A run with adapters: what is sent to engines, and exports that PEFT, transformers and a new vLLM engine read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.runs import ROOT, lines, numbers, run_to_end, train
from tests.needs import lacking

pytestmark = pytest.mark.e2e

SETTINGS = [
    "groups.train={devices: 0-3, roles: {actor: {tp: 2, pp: 2, recompute: full, offload: false}}}",
    "groups.train.roles.reference={tp: 2, pp: 2, offload: false}",
    "cluster.devices_per_node=6",
    "rollout={devices: 4-5, tp: 2, sleep: false}",
    "actor={lora: {rank: 6, alpha: 12, init: gaussian}, ema: {decay: 0.5}}",
    "actor.optimizer.lr=3e-2",
    "algo.kl.coef=0.01",
    "run.steps=2",
]
ALPHA = 2.0
"""The factor of products B A."""


SHARED = [
    "groups.train={devices: 0-1, roles: {actor: {tp: 2, pp: 1}, critic: {tp: 2, pp: 1}, reference: {tp: 2}}}",
    "groups.train.roles.reward={tp: 2}",
    "actor.lora={rank: 4, init: gaussian}",
    "critic.lora={rank: 2}",
    "actor.optimizer.lr=1e-2",
    "run.steps=2",
]


def test_a_critic_on_the_actors_weights_changes_no_number_where_all_take_turns(tmp_path: Path) -> None:
    """Roles move to the host, and an engine has one of their devices by turns, to which adapters alone are sent."""
    turns = [f"groups.train.roles.{role}.offload=true" for role in ("actor", "critic", "reference", "reward")]
    turns += ["rollout={devices: 0, sleep: true}", "resharding.adapters=separate", "critic.shares_base=true"]
    ways = {"apart": ["rollout={devices: 2, sleep: false}"], "turns": turns}
    for name, settings in ways.items():
        train(tmp_path / name, *SHARED, *settings).assert_succeeded()
    told = [numbers(tmp_path / name / "metrics.jsonl") for name in ways]
    for apart, turned in zip(*told, strict=True):
        for metric, value in apart.items():
            assert turned[metric] == pytest.approx(value, rel=1e-4, abs=1e-6), metric


def told_by(program: str, model: Path, adapters: Path, rows: list[list[int]], at: Path) -> list[list[float]]:
    packages = [str(path) for path in (ROOT / ".venv-trl/lib").glob("python3*/site-packages")]
    if not packages:
        lacking("make trl installs PEFT")
    file = at / "ids.json"
    file.write_text(json.dumps(rows))
    done = subprocess.run(
        [sys.executable, "-m", "tests.oracle.peft_logprobs", program, str(model), str(adapters), str(file)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *packages]),
            "HF_HUB_OFFLINE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("way", ["merged", "separate"])
def test_engines_and_exports_have_the_trained_adapters(tmp_path: Path, way: str) -> None:
    run = tmp_path / "run"
    arguments = ["train", "configs/debug/grpo.yaml", f"run.dir={run}", *SETTINGS, f"resharding.adapters={way}"]
    run_to_end(arguments).assert_succeeded()
    steps = lines(run / "metrics.jsonl")
    assert max(line["rollout/logprob_gap"] for line in steps) < 1e-5
    assert steps[0]["objective/kl"] == 0
    assert steps[1]["objective/kl"] > 1e-3, "the reference is the model without adapters"

    base = load_file(run / "model/model.safetensors")
    merged = load_file(run / "export/model.safetensors")
    adapters = load_file(run / "export-adapter/adapter_model.safetensors")
    sent = 4 * sum(value.numel() for value in (base if way == "merged" else adapters).values())
    # What both ranks of the engine have: norms, and the matrices that TP does not split.
    assert sent < steps[1]["sync/bytes"] < 1.8 * sent
    moved = 0
    for name, value in base.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        want = value
        if f"{module}.lora_A.weight" in adapters:
            want = value + ALPHA * adapters[f"{module}.lora_B.weight"] @ adapters[f"{module}.lora_A.weight"]
            moved += 1
        torch.testing.assert_close(merged[name], want, rtol=0, atol=1e-6)
    assert moved == 4 * 7
    averaged = load_file(run / "export-ema-adapter/adapter_model.safetensors")
    assert all(not torch.equal(averaged[name], value) for name, value in adapters.items())
    if way == "merged":
        return
    rows = np.random.default_rng(0).integers(1, 96, (3, 20)).tolist()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run / "export", dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor(rows)).logits[:, :-1].log_softmax(-1)
    expected = logits.gather(-1, torch.tensor(rows)[:, 1:, None])[..., 0]
    for program in ("peft", "vllm"):
        told = torch.tensor(told_by(program, run / "model", run / "export-adapter", rows, tmp_path))
        assert (told - expected).abs().max() < 1e-5, program
