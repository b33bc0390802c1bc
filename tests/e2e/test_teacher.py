"""On-policy distillation from a teacher of another size, vocabulary and layout, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e.runs import lines, run_to_end
from tests.megatron.tiny import save_model

pytestmark = pytest.mark.e2e

VOCABULARY = 150
"""Ids in use, on both ranks of the teacher, which has 200."""
CONFIG = """
defaults: [{base}, opd]
run: {{dir: {directory}/run, steps: 6, seed: 1}}
model: {{vocab_size: 150, random: {{config: {{vocab_size: 160}}}}}}
reference: {{path: {directory}/teacher}}
groups:
  train: {{devices: 0, roles: {{actor: {{tokens_per_micro_batch: 128}}}}}}
  teacher: {{devices: 2-3, roles: {{reference: {{tp: 2, tokens_per_micro_batch: 128}}}}}}
rollout: {{devices: 1, max_new_tokens: 32, max_model_len: 64, kv_cache_mib: 64, record: {directory}/recorded}}
data: {{prompts: {root}/configs/debug/data/prompts.jsonl, prompts_per_step: 8, samples_per_prompt: 2}}
actor: {{optimizer: {{lr: 3.0e-3}}}}
tracking: {{samples: all, tokens: true}}
"""
ROOT = Path(__file__).parents[2]
TEACHERS: dict[str, dict[str, Any]] = {
    "words": {"model_type": "llama", "vocab_size": 200, "hidden_size": 64, "num_hidden_layers": 2},
    "sums": {"model_type": "qwen3", "vocab_size": 160, "num_hidden_layers": 3},
}
SEVERAL = [
    "reference={{path: null, column: kind, teachers: {{words: {directory}/words, sums: {directory}/sums}}}}",
    "cluster={{devices_per_node: 6}}",
    "groups.teacher.devices=2-5",
    "groups.teacher.roles.reference={{tp: 1, pp: 2, tokens_per_micro_batch: 64, offload: true}}",
    "data.prompts={directory}/prompts.jsonl",
    "run.steps=2",
]


@torch.no_grad()
def teacher_logprobs(directory: Path, prompt: list[int], response: list[int]) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1, :VOCABULARY]
    return logits.double().log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].numpy()


def test_a_student_is_rewarded_by_a_teacher_of_another_size_and_vocabulary(tmp_path: Path) -> None:
    save_model(tmp_path / "teacher", "llama", vocab_size=200, hidden_size=64, num_hidden_layers=2, eos_token_id=0)
    config = tmp_path / "opd.yaml"
    config.write_text(CONFIG.format(base=ROOT / "configs/debug/base.yaml", directory=tmp_path, root=ROOT))
    done = run_to_end(["train", str(config)])
    done.assert_succeeded()
    samples = [row for row in lines(tmp_path / "run" / "samples.jsonl") if row["step"] in (1, 6)]
    assert len(samples) == 2 * 16
    by_step: dict[int, list[float]] = {1: [], 6: []}
    for sample in samples:
        assert sample["score"] is None
        tokens = sample["tokens"]
        name = sample["sample_id"].replace("/", "%2F")
        recorded = np.load(tmp_path / "recorded" / f"{name}.npz")
        ids = (recorded["prompt_ids"].tolist(), recorded["response_ids"].tolist())
        under_teacher = teacher_logprobs(tmp_path / "teacher", *ids)
        # The file has six digits of each number, of which some are above 10.
        np.testing.assert_allclose(tokens["ref_logprobs"], under_teacher, rtol=5e-6, atol=2e-5)
        ratios = np.array(tokens["old_logprobs"]) - under_teacher
        np.testing.assert_allclose(tokens["advantages"], -ratios, rtol=5e-6, atol=1e-4)
        by_step[sample["step"]].append(ratios.sum())
    steps = lines(tmp_path / "run" / "metrics.jsonl")
    for step, divergences in by_step.items():
        assert steps[step - 1]["objective/kl"] == pytest.approx(np.mean(divergences), abs=1e-3)
    assert not any("objective/score" in step or "group/zero_std_fraction" in step for step in steps)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "objective/kl_per_token in training" in summary["verdict"]


def test_each_prompt_has_its_own_teacher(tmp_path: Path) -> None:
    """Two replicas of two stages; the teachers take turns on their devices."""
    for name, sizes in TEACHERS.items():
        save_model(tmp_path / name, eos_token_id=0, **sizes)
    rows = lines(ROOT / "configs/debug/data/prompts.jsonl")
    kinds = [("words", "sums", "sums")[row % 3] for row in range(len(rows))]
    texts = [json.dumps({**row, "kind": kind}) for row, kind in zip(rows, kinds, strict=True)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(texts))
    config = tmp_path / "opd.yaml"
    config.write_text(CONFIG.format(base=ROOT / "configs/debug/base.yaml", directory=tmp_path, root=ROOT))
    overrides = [setting.format(directory=tmp_path) for setting in SEVERAL]
    run_to_end(["train", str(config), *overrides]).assert_succeeded()
    seen: set[str] = set()
    for sample in lines(tmp_path / "run" / "samples.jsonl"):
        recorded = np.load(tmp_path / "recorded" / f"{sample['sample_id'].replace('/', '%2F')}.npz")
        ids = (recorded["prompt_ids"].tolist(), recorded["response_ids"].tolist())
        kind = kinds[rows.index({"prompt_ids": ids[0]})]
        seen.add(kind)
        under_teacher = teacher_logprobs(tmp_path / kind, *ids)
        np.testing.assert_allclose(sample["tokens"]["ref_logprobs"], under_teacher, rtol=5e-6, atol=2e-5)
    assert seen == set(TEACHERS)
    plan = run_to_end(["plan", "memory", str(config), *overrides, f"run.dir={tmp_path}/other"])
    assert "reference.sums" in plan.output
    wrong = run_to_end(["plan", str(config), *overrides, f"data.prompts={ROOT}/configs/debug/data/prompts.jsonl"])
    assert wrong.status == 2
    assert "a column of every row with one of words, sums; prompt 1 has None" in wrong.errors
