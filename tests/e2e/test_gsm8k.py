"""The example of GSM8K: its reward, and its configurations at a tiny size on rows in the data's format."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.gsm8k.gsm8k_reward import correct
from examples.sort_letters.checkpoint import write_checkpoint
from megarl.files import read_lines
from tests.config.debug import REPOSITORY
from tests.rewards.completions import completion

EXAMPLE = REPOSITORY / "examples" / "gsm8k"
SOLUTION = "She sold 48/2 = <<48/2=24>>24 clips in May. She sold 48+24 = <<48+24=72>>72 clips.\n#### 72"
TINY = (
    "cluster={device: cpu, object_store_mib: 128, threads_per_device: 1}",
    "run.steps=2",
    "data={prompts_per_step: 2, samples_per_prompt: 2, prompts: {subset: null, split: null}}",
    "rollout={max_new_tokens: 8, max_model_len: 64, kv_cache_mib: 16}",
    "evaluation.prompts={subset: null, split: null}",
    "checkpoint.every=null",
)


@pytest.mark.parametrize(
    ("response", "score"),
    [("So it is 72.", 1.0), ("\\boxed{72}", 1.0), ("$\\frac{144}{2}$", 1.0), ("72 and then 27", 0.0), ("none", 0.0)],
)
def test_the_reward_compares_answers(response: str, score: float) -> None:
    assert correct(completion(response, answer=SOLUTION)) == score


@pytest.mark.parametrize(
    "name", [pytest.param("one_gpu", marks=pytest.mark.e2e), pytest.param("eight_gpus", marks=pytest.mark.process)]
)
def test_the_configurations_run_at_a_tiny_size(tmp_path: Path, name: str) -> None:
    """The second one is planned: it differs by its devices alone."""
    write_checkpoint(tmp_path / "model", 0)
    rows = [{"question": f"abc {number}?", "answer": f"It is {number}.\n#### {number}"} for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [f"{field}.path={tmp_path}/rows.jsonl" for field in ("data.prompts", "evaluation.prompts")]
    settings = [*TINY, f"run.dir={tmp_path}/run", f"model.path={tmp_path}/model", *files]
    subcommand = "train" if name == "one_gpu" else "plan"
    command = [sys.executable, "-m", "megarl", subcommand, str(EXAMPLE / f"{name}.yaml"), *settings]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    if subcommand == "train":
        steps = read_lines(tmp_path / "run" / "metrics.jsonl")
        assert len(steps) == 2
        assert all("scores/correct" in step for step in steps)
