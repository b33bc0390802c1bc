"""An exported model, evaluated with `megarl eval`: its answers against transformers, and failing functions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.e2e.conftest import DebugRun
from tests.e2e.runs import ROOT, Finished, lines, run_to_end

pytestmark = pytest.mark.e2e

PROMPTS = lines(ROOT / "configs/debug/data/prompts.jsonl")[:12]
VOCABULARY, NEW_TOKENS, END = 96, 32, 0
FUNCTIONS = [
    {"name": "soft_overlong", "args": {"max_tokens": NEW_TOKENS, "buffer_tokens": NEW_TOKENS}},
    {"name": "tests.rewards.functions:quotient", "args": {"size": NEW_TOKENS}},
    {"name": "tests.rewards.functions:hangs_once_in_a_while", "args": {"every": 6}},
]


def evaluate(run_dir: Path, *overrides: str) -> Finished:
    return run_to_end(["eval", "configs/debug/eval.yaml", f"run.dir={run_dir}", *overrides])


def reward_model(model_dir: Path, directory: Path) -> None:
    """Writes a random model of the same sizes with a score head."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(model_dir, num_labels=1)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(directory)


@torch.no_grad()
def likeliest(model_dir: Path) -> list[list[int]]:
    """What transformers' ``generate`` answers to each prompt."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    answers = []
    for row in PROMPTS:
        ids = torch.tensor([row["prompt_ids"]])
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            suppress_tokens=list(range(VOCABULARY, model.config.vocab_size)),
            pad_token_id=END,
        )
        answers.append(whole[0, ids.shape[1] :].tolist())
    return answers


def test_an_export_answers_greedily_and_failing_functions_lose_only_their_samples(
    debug_run: DebugRun, tmp_path: Path
) -> None:
    export, run_dir = debug_run.directory / "export", tmp_path / "run"
    reward_model(export, tmp_path / "judge")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f"{json.dumps(row)}\n" for row in PROMPTS))
    done = evaluate(
        run_dir,
        "model.random=null",
        f"model.path={export}",
        "groups={scoring: {devices: 0-1, roles: {reward: {tokens_per_micro_batch: 128}}}}",
        f"evaluation.prompts={prompts}",
        "evaluation={greedy: true, samples_per_prompt: 1, pass_at: [1]}",
        f"evaluation.functions={json.dumps(FUNCTIONS)}",
        f"reward={{path: {tmp_path / 'judge'}, time_limit: 3, retries: 0, processes: 2}}",
        "tracking.samples=12",
    )
    done.assert_succeeded()
    expected = likeliest(export)
    samples = lines(run_dir / "samples.jsonl")
    assert [sample["response"] for sample in samples] == expected

    (metrics,) = lines(run_dir / "evaluations.jsonl")
    lengths = [len(answer) for answer in expected]
    truncated = [answer[-1] != END for answer in expected]
    assert (metrics["eval/prompts"], metrics["eval/samples"]) == (12, 12)
    assert metrics["eval/response_length"] == pytest.approx(sum(lengths) / 12)
    assert metrics["eval/response_length_max"] == max(lengths)
    assert metrics["eval/truncated_fraction"] == pytest.approx(sum(truncated) / 12)
    assert metrics["eval/soft_overlong"] == pytest.approx(-sum(lengths) / 12 / NEW_TOKENS)
    assert metrics["eval/soft_overlong_pass_at_1"] == pytest.approx(sum(2 * n <= NEW_TOKENS for n in lengths) / 12)
    assert metrics["eval/score"] == pytest.approx(sum(sample["score"] for sample in samples) / 12, rel=1e-5)
    assert metrics["eval/unscored/quotient"] == lengths.count(NEW_TOKENS) > 0
    assert metrics["eval/unscored/hangs_once_in_a_while"] == 2
    assert done.errors.count("gave prompt") == 2
    assert "return 1.0 / (len(completion.response_ids) - size)" in done.errors
    assert "it took longer than 3 s, and was ended" in done.errors
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["evaluation"]["eval/score"] == metrics["eval/score"]
