"""A run of conversations with an environment, sampled by two engines while their weights change."""

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
from megarl.convert.exporting import export_checkpoint
from megarl.convert.resources import Resources
from megarl.rewards.functions import Completion
from tests.e2e.runs import lines, run_to_end

pytestmark = [pytest.mark.e2e]

CONFIG = r"""
stage: grpo
run: {{dir: {directory}/run, steps: {steps}}}
checkpoint: {{every: 1, keep: {steps}}}
model: {{path: {directory}/model}}
data: {{tasks: 5, prompts_per_step: 3, samples_per_prompt: 4}}
evaluation: {{tasks: 3, samples_per_prompt: 2, pass_at: [1, 2]}}
environment: {{name: "tests.conversations.worlds:Letters", args: {{turns: 3}}, processes: 2}}
reward:
  functions: [{{name: "tests.e2e.test_environments:written", args: {{file: {directory}/trained.jsonl}}}}]
  judge_model:
    path: {directory}/judge
    devices: "3"
    template: "{{response}}="
    pattern: '(\d)'
    weight: 0
    max_new_tokens: 4
    max_model_len: 64
    kv_cache_mib: 64
cluster: {{device: cpu, devices_per_node: 4}}
groups: {{train: {{devices: "0", roles: {{actor: {{tokens_per_micro_batch: 128}}}}}}}}
rollout:
  devices: "1-2"
  max_new_tokens: 24  # of which turns have some 12, so that syncs fall into them
  max_model_len: 64
  kv_cache_mib: 64
  stop_token_ids: [{stops}]
  record: {directory}/sampled
actor: {{optimizer: {{lr: 1.0e-3}}}}
"""


STEPS = 5


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


@pytest.mark.parametrize(
    "mode",
    [
        "{mode: inflight, max_staleness: 2}",
        pytest.param("{mode: inflight, max_staleness: 2, inflight_cache: keep}", marks=pytest.mark.matrix),
        pytest.param("{mode: bounded, max_staleness: 2}", marks=pytest.mark.matrix),
        pytest.param("{mode: exact, max_staleness: 1}", marks=pytest.mark.matrix),
    ],
)
def test_a_run_is_trained_on_the_turns_that_the_engines_sampled(tmp_path: Path, mode: str) -> None:
    write_checkpoint(tmp_path / "model", 0)
    stops = ", ".join(map(str, range(3, 9)))
    write_judge(tmp_path / "judge")
    (tmp_path / "run.yaml").write_text(CONFIG.format(directory=tmp_path, stops=stops, steps=STEPS))
    pause = 0.15 if "inflight" in mode else 0.6  # syncs fall into turns, or between them
    settings = [f"rollout={mode}", f"environment.args.pause={pause}"]
    finished = run_to_end(["train", str(tmp_path / "run.yaml"), *settings], writes_model=True)
    finished.assert_succeeded()
    steps = lines(tmp_path / "run" / "metrics.jsonl")
    assert steps[0]["rollout/logprob_gap"] < 1e-4, "trainer and engines disagree"
    stale, inflight = [step["staleness/max"] for step in steps], "inflight" in mode
    assert stale == [0, 1, 1, 1, 1] if "exact" in mode else max(stale) <= 2
    _, *trained = lines(tmp_path / "trained.jsonl")  # without the trial call
    assert len(trained) == STEPS * 12
    sampled = tmp_path / "sampled"
    turns = sorted(path for path in sampled.iterdir() if not path.name.startswith("0%2F"))  # without evaluations
    versions = {path: np.load(path)["versions"][:, 2].tolist() for path in turns}
    # Whether a sync falls into a turn or between two depends on time; where none may, none does.
    assert inflight or not any(len(own) > 1 for own in versions.values()), "no weights change in a turn"
    of_conversations: dict[str, set[int]] = {}
    for path, own in versions.items():
        of_conversations.setdefault(path.name.partition("turn-")[0], set()).update(own)
    assert "exact" not in mode or not any(len(own) > 1 for own in of_conversations.values()), "nor between turns"
    assert_log_probabilities(turns, tmp_path, whole="keep" not in mode)
    assert sum(check_turns(trained, sampled)) > len(trained)
    judge: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "judge")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "judge")
    judged = [judged_by_transformers(judge, tokenizer, row["response"]) for row in trained]
    known = [score for score in judged if score is not None]
    assert sum(step["rewards/unscored/judge_model"] for step in steps) == len(judged) - len(known)
    scored = [(step["scores/judge_model"], 12 - step["rewards/unscored/judge_model"]) for step in steps]
    assert sum(mean * count for mean, count in scored) == pytest.approx(sum(known))
    check_evaluations(tmp_path / "run")
    check_transcripts(tmp_path / "run")


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
    recorded = [path for path in sampled.iterdir() if not path.name.startswith("0%2F")]  # without evaluations
    assert sum(turns) == len(recorded), "every turn is trained on, once"
    return turns


def assert_log_probabilities(turns: Sequence[Path], directory: Path, *, whole: bool) -> None:
    """Compares each token's log-probability with that of transformers, with the weights of the token's version.

    Args:
        whole: also in turns of several versions, whose later weights have read the whole conversation.
    """
    models = [AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)]
    for step in range(1, STEPS):
        hf, resources = directory / f"version-{step}", Resources(memory=4 << 30, processes=1)
        export_checkpoint(directory / "run", hf, resources=resources, template=directory / "model", step=step)
        models.append(AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32))
    later = 0
    for path in turns:
        with np.load(path) as stored:
            prompt, ids, own = (stored[name] for name in ("prompt_ids", "response_ids", "rollout_logprobs"))
            spans = stored["versions"].tolist()
        if len(spans) > 1 and not whole:
            continue
        tokens = torch.from_numpy(np.concatenate([prompt, ids]).astype(np.int64))
        for start, stop, version, _ in spans:
            with torch.no_grad():
                by_version = [model(tokens[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for model in models]
            expected = torch.stack([logprobs.gather(1, tokens[len(prompt) :, None])[:, 0] for logprobs in by_version])
            gaps = (expected - torch.from_numpy(own)).abs()[:, start:stop].amax(1)
            assert gaps[version] < 1e-4, path
            later += version > 0
            assert version == 0 or gaps[version - 1] > 10 * gaps[version], "the versions are alike"
    assert later > STEPS


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


def judged_by_transformers(model: Any, tokenizer: Any, response: str) -> float | None:
    """Returns the digit in what transformers answers to the judge's question; None without one."""
    ids = torch.tensor([tokenizer.encode(f"{response}=")])
    answer = model.generate(ids, do_sample=False, max_new_tokens=4)[0, ids.shape[1] :]
    found = re.findall(r"\d", tokenizer.decode(answer))
    return float(found[-1]) if found else None


def check_evaluations(run: Path) -> None:
    """Tasks that are not trained on, counted by conversation."""
    prompts = lines(run / "prompt_scores.jsonl")
    assert [of["prompt_id"] for of in prompts] == ["task-5", "task-6", "task-7"] * 2
    for line in lines(run / "evaluations.jsonl"):
        assert (line["eval/prompts"], line["eval/samples"], line["eval/environment/failed"]) == (3, 6, 0)
        scores = [of["scores"]["environment"] for of in prompts if of["step"] == line["step"]]
        assert [len(of) for of in scores] == [2, 2, 2]
        assert line["eval/environment_pass_at_1"] == pytest.approx(np.mean(np.array(scores) >= 1))
        assert line["eval/environment_pass_at_2"] == pytest.approx(np.mean(np.max(scores, axis=1) >= 1))


def check_transcripts(run: Path) -> None:
    """The turns of a conversation are all of its text; their rewards are its score by the environment."""
    talks = lines(run / "samples.jsonl")
    assert {talk["kind"] for talk in talks} == {"train", "evaluation"}
    for talk in talks:
        turns = talk["turns"]
        assert talk["text"] == f"<bos>{talk['prompt']}" + "".join(turn["text"] for turn in turns)
        own = [turn for turn in turns if turn["sampled"]]
        assert [turn["sampled"] for turn in turns] == [True, *[False, True] * (len(own) - 1)]
        assert sum(turn["tokens"] for turn in own) == talk["response_tokens"]
        assert sum(turn["reward"] for turn in own) == talk["scores"]["environment"]
        assert all("say " in turn["text"] for turn in turns if not turn["sampled"])
        assert talk["outcome"]["turns"] == talk["outcome"]["metrics"]["asked"] == len(own)


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
