"""A run of conversations with an environment, sampled ahead by two engines: what is trained is what was sampled."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.sort_letters.checkpoint import write_checkpoint
from megarl.rewards.functions import Completion
from tests.e2e.runs import finish, lines, started

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

CONFIG = r"""
stage: grpo
run: {{dir: {directory}/run, steps: 3}}
model: {{path: {directory}/model}}
data: {{prompts: {directory}/tasks.jsonl, prompts_per_step: 3, samples_per_prompt: 4}}
environment: {{name: "tests.environments.worlds:Letters", args: {{turns: 4}}, processes: 2}}
reward:
  functions: [{{name: "tests.e2e.test_environments:written", args: {{file: {directory}/trained.jsonl}}}}]
  judge_model:
    path: {directory}/judge
    devices: "3"
    template: "{{response}}="
    pattern: '(\d)'
    weight: 0
    max_new_tokens: 4
    max_model_len: 16
    kv_cache_mib: 64
cluster: {{device: cpu, devices_per_node: 4}}
groups: {{train: {{devices: "0", roles: {{actor: {{tokens_per_micro_batch: 128}}}}}}}}
rollout:
  devices: "1-2"
  max_new_tokens: 6
  max_model_len: 60
  max_staleness: 1
  stop_token_ids: [{stops}]
  record: {directory}/sampled
actor: {{optimizer: {{lr: 1.0e-3}}}}
"""


def written(completion: Completion, file: str) -> float:
    """Writes what is trained on; scores the number of sampled tokens."""
    row = {
        "prompt_id": completion.prompt_id,
        "ids": [*completion.prompt_ids, *completion.response_ids],
        "response": completion.response,
        "mask": [0] * len(completion.prompt_ids) + [int(own) for own in completion.loss_mask or ()],
    }
    with open(file, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(row) + "\n")
    return completion.response_tokens / 10


def test_a_run_is_trained_on_the_turns_that_the_engines_sampled(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", 0)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"number": number}) + "\n" for number in range(5)))
    stops = ", ".join(map(str, range(3, 60)))
    write_judge(tmp_path / "judge")
    (tmp_path / "run.yaml").write_text(CONFIG.format(directory=tmp_path, stops=stops))
    with started(["train", str(tmp_path / "run.yaml")], writes_model=True) as run:
        finished = finish(*run)
    assert finished.status == 0, finished.errors
    finished.assert_clean()
    steps = lines(tmp_path / "run" / "metrics.jsonl")
    assert steps[0]["rollout/logprob_gap"] < 1e-4, "trainer and engines disagree"
    assert [step["staleness/max"] for step in steps] == [0, 1, 1]
    _, *trained = lines(tmp_path / "trained.jsonl")  # without the trial call
    assert len(trained) == 36
    assert sum(check_turns(trained, tmp_path / "sampled")) > 50
    judged = [judged_by_transformers(tmp_path / "judge", row["response"]) for row in trained]
    for number, step in enumerate(steps):
        expected = [score for score in judged[12 * number : 12 * number + 12] if score is not None]
        assert step["rewards/unscored/judge_model"] == 12 - len(expected)
        assert step["scores/judge_model"] == pytest.approx(np.mean(expected))


def check_turns(trained: Sequence[dict[str, Any]], sampled: Path) -> list[int]:
    """Asserts that rows of `written` are what the engines recorded, each turn in one row; returns the rows' turns.

    Args:
        sampled: `rollout.record`; conversations have one branch.
    """
    turns: list[int] = []
    for row in trained:
        for sample in sampled.glob(f"*%2F{quote(row['prompt_id'])}%2F*%2Fturn-0.npz"):
            if count := _turns(sample, row):
                turns.append(count)
                sample.rename(sample.with_suffix(".used"))
                break
        else:
            pytest.fail(f"no engine sampled {row}")
    assert sum(turns) == len(list(sampled.glob("*"))), "every turn is trained on, once"
    return turns


@torch.no_grad()
def write_judge(directory: Path) -> None:
    """Writes a random model that mostly answers with a digit, which ends its answer."""
    write_checkpoint(directory, 1)
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    digits = tokenizer.convert_tokens_to_ids(list("0123456789"))
    model.get_output_embeddings().weight[digits] *= 20
    model.generation_config.eos_token_id = digits
    model.save_pretrained(directory)


def judged_by_transformers(directory: Path, response: str) -> float | None:
    """Returns the digit in what transformers answers to the judge's question; None without one."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = torch.tensor([tokenizer.encode(f"{response}=")])
    answer = model.generate(ids, do_sample=False, max_new_tokens=4)[0, ids.shape[1] :]
    found = re.findall(r"\d", tokenizer.decode(answer))
    return float(found[-1]) if found else None


def _turns(first: Path, row: dict[str, list[int]]) -> int:
    """Returns how many turns a conversation has if they are the row's, else 0."""
    ids, mask, place, count = row["ids"], row["mask"], 0, 0
    while (file := first.with_name(first.name.replace("turn-0", f"turn-{count}"))).exists():
        with np.load(file) as stored:
            prompt, response = stored["prompt_ids"].tolist(), stored["response_ids"].tolist()
        if ids[: len(prompt)] != prompt or ids[len(prompt) : len(prompt) + len(response)] != response:
            return 0
        if any(mask[place : len(prompt)]) or not all(mask[len(prompt) : len(prompt) + len(response)]):
            return 0
        place, count = len(prompt) + len(response), count + 1
    return count if place == len(ids) else 0
