"""SFT and a reward model, run as a user runs them; what they say of held-out data, by transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tests.e2e.runs import ROOT, Finished, finish, lines, started

pytestmark = pytest.mark.e2e

VOCABULARY = 96
"""Ids in use; the model has some more, without probability."""


def run(config: str, directory: Path) -> Finished:
    with started(["train", f"configs/debug/{config}.yaml", f"run.dir={directory}"]) as program:
        return finish(*program)


def held_out(name: str) -> list[dict[str, list[int]]]:
    return lines(ROOT / "configs/debug/data" / f"{name}_held_out.jsonl")


@torch.no_grad()
def nll(directory: Path) -> float:
    """Mean negative log-likelihood of the held-out responses' tokens, one sequence at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    total, tokens = 0.0, 0
    for row in held_out("demonstrations"):
        prompt, response = row["prompt_ids"], row["response_ids"]
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1, :VOCABULARY]
        total += float(-logits.double().log_softmax(-1).gather(1, torch.tensor(response)[:, None]).sum())
        tokens += len(response)
    return total / tokens


@torch.no_grad()
def preferences(directory: Path) -> tuple[float, float]:
    """Accuracy and loss on the held-out pairs, one sequence at a time: Bradley-Terry, and centring with weight 0.01."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    right, loss = 0, 0.0
    pairs = held_out("pairs")
    for row in pairs:
        chosen, rejected = (
            float(model.score(model.model(torch.tensor([row["prompt_ids"] + row[side]])).last_hidden_state)[0, -1, 0])
            for side in ("chosen_ids", "rejected_ids")
        )
        right += chosen > rejected
        loss += math.log1p(math.exp(rejected - chosen)) + 0.01 * (chosen + rejected) ** 2
    return right / len(pairs), loss / len(pairs)


def test_sft_learns_and_says_what_transformers_says(tmp_path: Path) -> None:
    done = run("sft", tmp_path / "run")
    assert done.status == 0, done.errors
    done.assert_clean()
    before, after = lines(tmp_path / "run" / "evaluations.jsonl")
    assert (before["step"], after["step"]) == (0, 4)
    assert after["eval/loss"] < before["eval/loss"]
    assert before["eval/loss"] == pytest.approx(nll(tmp_path / "run" / "model"), rel=1e-5)
    assert after["eval/loss"] == pytest.approx(nll(tmp_path / "run" / "export"), rel=1e-5)
    steps = lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["sft/lr"] for line in steps] == pytest.approx([5e-4, 1e-3, 2e-3 / 3, 1e-3 / 3])


def test_a_reward_model_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    done = run("reward_model", tmp_path / "run")
    assert done.status == 0, done.errors
    done.assert_clean()
    _, after = lines(tmp_path / "run" / "evaluations.jsonl")
    accuracy, loss = preferences(tmp_path / "run" / "export")
    assert after["eval/accuracy"] == pytest.approx(accuracy)
    assert after["eval/loss"] == pytest.approx(loss, rel=1e-5)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    scale = json.loads((tmp_path / "run" / "export" / "reward_normalisation.json").read_text())
    assert summary["export"] == {"normalisation/mean": scale["mean"], "normalisation/std": scale["std"]}
    assert scale["std"] > 0
