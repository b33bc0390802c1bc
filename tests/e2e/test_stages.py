"""SFT, a reward model and DPO as a user runs them; their results on held-out data against transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.e2e.runs import ROOT, Finished, lines, run_to_end

pytestmark = pytest.mark.e2e

VOCABULARY = 96
"""Ids in use; the model has some more, without probability."""


def run(config: str, directory: Path, *overrides: str) -> Finished:
    return run_to_end(["train", f"configs/debug/{config}.yaml", f"run.dir={directory}", *overrides])


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
def scored(directory: Path, head: torch.Tensor | None = None) -> np.ndarray:
    """[pairs, 2] scores of the held-out pairs, one sequence at a time; with another head than the directory's."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32, num_labels=1)
    if head is not None:
        model.score.weight.copy_(head)
    scores = [
        [
            float(model.score(model.model(torch.tensor([row["prompt_ids"] + row[side]])).last_hidden_state)[0, -1, 0])
            for side in ("chosen_ids", "rejected_ids")
        ]
        for row in held_out("pairs")
    ]
    return np.array(scores)


def pairs_and_bad_ones(file: Path) -> Path:
    """The pairs of the debug run, with unusable rows before, among and after them."""
    pairs = lines(ROOT / "configs/debug/data/pairs.jsonl")
    bad = {"prompt_ids": [5], "chosen_ids": [6, 0], "rejected_ids": [6, 0]}
    rows = [bad, *pairs[:5], {**bad, "rejected_ids": []}, bad, *pairs[5:], {**bad, "chosen_ids": [6] * 80}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_sft_learns_and_its_losses_equal_transformers(tmp_path: Path) -> None:
    done = run("sft", tmp_path / "run")
    done.assert_succeeded()
    before, after = lines(tmp_path / "run" / "evaluations.jsonl")
    assert (before["step"], after["step"]) == (0, 4)
    assert after["eval/loss"] < before["eval/loss"]
    assert before["eval/loss"] == pytest.approx(nll(tmp_path / "run" / "model"), rel=1e-5)
    assert after["eval/loss"] == pytest.approx(nll(tmp_path / "run" / "export"), rel=1e-5)
    steps = lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["sft/lr"] for line in steps] == pytest.approx([5e-4, 1e-3, 2e-3 / 3, 1e-3 / 3])


@pytest.fixture(scope="module")
def rewarded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory and output of a reward-model training on pairs of which some are unusable."""
    directory = tmp_path_factory.mktemp("reward")
    train = pairs_and_bad_ones(directory / "pairs.jsonl")
    done = run(
        "reward_model", directory / "run", f"data.train={train}", "data.too_long=drop", "normalisation.before=true"
    )
    done.assert_succeeded()
    return directory, done.output


def test_a_trained_reward_model_scores_as_in_transformers(rewarded: tuple[Path, str]) -> None:
    run = rewarded[0] / "run"
    _, after = lines(run / "evaluations.jsonl")
    chosen, rejected = scored(run / "export").T
    loss = np.log1p(np.exp(rejected - chosen)) + 0.01 * (chosen + rejected) ** 2
    accuracy = (chosen > rejected).mean()
    assert after["eval/accuracy"] == pytest.approx(accuracy)
    assert after["eval/accuracy_ci95"] == pytest.approx(1.959964 * np.std(chosen > rejected) / len(chosen) ** 0.5)
    assert after["eval/loss"] == pytest.approx(loss.mean(), rel=1e-5)
    told = json.loads((run / "export" / "reward_statistics.json").read_text())
    columns = {"chosen": chosen, "rejected": rejected, "margin": chosen - rejected}
    assert told["mean"] == pytest.approx({name: own.mean() for name, own in columns.items()}, rel=1e-4, abs=1e-6)
    assert told["std"] == pytest.approx({name: own.std() for name, own in columns.items()}, rel=1e-4, abs=1e-6)
    assert (told["preferences"], told["accuracy"]) == (8, pytest.approx(accuracy))
    summary = json.loads((run / "summary.json").read_text())
    scale = json.loads((run / "export" / "reward_normalisation.json").read_text())
    assert summary["export"]["normalisation/std"] == scale["std"] > 0
    assert summary["export"]["normalisation/mean"] == scale["mean"]
    assert summary["export"]["held_out/margin_mean"] == told["mean"]["margin"]


def test_the_head_is_scaled_before_the_first_step(rewarded: tuple[Path, str]) -> None:
    """The scores of the new head, N(0, 1 / sqrt(hidden + 1)), divided by their deviation on the reference samples."""
    run = rewarded[0] / "run"
    before, _ = lines(run / "evaluations.jsonl")
    start = json.loads((run / "summary.json").read_text())["start"]
    head = torch.randn(1, 128, generator=torch.Generator().manual_seed(0)) / math.sqrt(129)
    chosen, rejected = scored(run / "model", head).T / start["normalisation/before_std"]
    assert before["eval/chosen"] == pytest.approx(chosen.mean(), rel=1e-4)
    assert before["eval/rejected"] == pytest.approx(rejected.mean(), rel=1e-4)


def test_unusable_rows_are_named_and_counted(rewarded: tuple[Path, str]) -> None:
    directory, output = rewarded
    faults = {1: "equal", 7: "empty", 8: "equal", 36: "too_long"}
    told = lines(directory / "run" / "left_out.jsonl")
    assert {row["where"]: row["fault"] for row in told} == {
        f"{directory}/pairs.jsonl, line {line}": fault for line, fault in faults.items()
    }
    assert {row["field"] for row in told} == {"data.train"}
    assert f"{directory}/pairs.jsonl, line 1 (and 1 more): the better response is the same as another" in output
    for line in lines(directory / "run" / "metrics.jsonl"):
        counts = (line[f"data/dropped_{fault}"] for fault in ("equal", "empty", "too_long"))
        assert tuple(counts) == (2, 1, 1)
        assert line["data/epochs"] == line["step"] * 8 / 32


@torch.no_grad()
def response_logprobs(directory: Path, rows: list[tuple[list[int], list[int]]]) -> np.ndarray:
    """The log-probabilities of responses to prompts, one sequence at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    found = []
    for prompt, response in rows:
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1, :VOCABULARY]
        chances = logits.double().log_softmax(-1).gather(1, torch.tensor(response)[:, None])
        found.append(float(chances.sum()))
    return np.array(found)


def responses_of(pairs: list[dict[str, list[int]]]) -> list[tuple[list[int], list[int]]]:
    """Prompts with responses, the chosen one of each pair first."""
    return [(row["prompt_ids"], row[side]) for row in pairs for side in ("chosen_ids", "rejected_ids")]


@pytest.mark.parametrize("precompute", [pytest.param(False, marks=pytest.mark.matrix), True])
def test_dpo_learns_and_its_losses_equal_transformers(tmp_path: Path, precompute: bool) -> None:
    """The reference, of another layout than the actor, keeps the initial weights, or kept log-probabilities."""
    settings = ["preference.loss.label_smoothing=0.1"]
    if precompute:
        settings += ["reference.precompute=true", "groups.train.roles.reference=null"]
        run("dpo", tmp_path / "run", *settings, "run.steps=2", "checkpoint.every=2").assert_succeeded()
    done = run("dpo", tmp_path / "run", *settings)
    done.assert_succeeded()
    before, *_, after = lines(tmp_path / "run" / "evaluations.jsonl")
    assert before["eval/loss"] == pytest.approx(math.log(2), rel=1e-5)
    rows = responses_of(held_out("pairs"))
    initial, trained = (response_logprobs(tmp_path / "run" / name, rows).reshape(-1, 2) for name in ("model", "export"))
    rewards = 0.1 * (trained - initial)
    margins = rewards[:, 0] - rewards[:, 1]
    losses = 0.9 * np.log1p(np.exp(-margins)) + 0.1 * np.log1p(np.exp(margins))
    assert after["eval/loss"] == pytest.approx(losses.mean(), rel=1e-5)
    assert after["eval/accuracy"] == pytest.approx((margins > 0).mean())
    names = ("eval/chosen", "eval/rejected", "eval/logprob_chosen", "eval/logprob_rejected")
    expected = [*rewards.mean(0), *trained.mean(0)]
    assert [after[name] for name in names] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    steps = lines(tmp_path / "run" / "metrics.jsonl")
    if precompute:
        assert not any("perf/tokens/reference" in step for step in steps)
    else:
        assert all(step["perf/tokens/reference"] == step["perf/tokens/actor_update"] for step in steps)
    assert all(step["dpo/entropy"] > 0 for step in steps)


def rated(file: Path, pairs: list[dict[str, list[int]]]) -> Path:
    """The responses of pairs, of which the chosen ones are desirable."""
    rows = [
        {"prompt_ids": prompt, "response_ids": response, "label": index % 2 == 0}
        for index, (prompt, response) in enumerate(responses_of(pairs))
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_kto_learns_and_its_losses_equal_transformers(tmp_path: Path) -> None:
    train = rated(tmp_path / "train.jsonl", lines(ROOT / "configs/debug/data/pairs.jsonl"))
    evaluation = rated(tmp_path / "held_out.jsonl", held_out("pairs"))
    data = [f"data.train={train}", f"data.evaluation={evaluation}", "data.pairs_per_step=16"]
    done = run("dpo", tmp_path / "run", "preference.loss={name: kto, undesirable_weight: 0.5}", *data)
    done.assert_succeeded()
    before, after = lines(tmp_path / "run" / "evaluations.jsonl")
    assert before["eval/loss"] == pytest.approx(0.75 / 2, rel=1e-5)
    rows = responses_of(held_out("pairs"))
    others = []
    for index, (prompt, _) in enumerate(rows):
        following = rows[index + 1 :] + rows[:index]
        response = next(response for other, response in following if other != prompt)
        others.append((prompt, response[: 64 - len(prompt)]))
    directories = [tmp_path / "run" / name for name in ("model", "export")]
    initial, trained = (response_logprobs(directory, rows) for directory in directories)
    start, end = (response_logprobs(directory, others).mean() for directory in directories)
    kl = max(0.0, end - start)
    side = np.tile([1, -1], len(rows) // 2)
    lead = side * 0.1 * (trained - initial - kl)
    losses = np.tile([1, 0.5], len(rows) // 2) / (1 + np.exp(lead))
    assert after["eval/loss"] == pytest.approx(losses.mean(), rel=1e-5)
    assert after["eval/kl"] == pytest.approx(kl, rel=1e-4, abs=1e-5)
    assert after["eval/accuracy"] == pytest.approx((lead > 0).mean())
    rewards = 0.1 * (trained - initial)
    assert after["eval/desirable"] == pytest.approx(rewards[0::2].mean(), rel=1e-4, abs=1e-6)
    assert after["eval/undesirable"] == pytest.approx(rewards[1::2].mean(), rel=1e-4, abs=1e-6)
