"""GRPO on a rule, with roles and engine that alternate on their devices, against the same run without offloading.

Another rule raises on every fourth prompt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megarl.cluster import workers
from tests.e2e import frames
from tests.e2e.runs import Finished, lines, numbers, run_to_end

pytestmark = pytest.mark.e2e


FUNCTIONS = [
    {"name": "soft_overlong", "args": {"max_tokens": 32, "buffer_tokens": 32}},
    {"name": "tests.rewards.functions:raises_once_in_a_while", "args": {"every": 4}},
]


def run(directory: Path, *overrides: str, before: str = "pass") -> Finished:
    settings = [f"reward.functions={json.dumps(FUNCTIONS)}", "evaluation.every=1"]
    return run_to_end(["train", "configs/debug/grpo.yaml", f"run.dir={directory}", *settings, *overrides], before)


@pytest.mark.matrix
@pytest.mark.parametrize("setting", ["top_p=0.8", "top_k=20", "min_p=0.05"])
def test_trainers_normalize_over_the_tokens_that_were_kept(tmp_path: Path, setting: str) -> None:
    bound = [] if "top_k" in setting else ["rollout.kept_max=90"]
    run(tmp_path, f"rollout.{setting}", *bound).assert_succeeded()
    for line in lines(tmp_path / "metrics.jsonl"):
        assert line["rollout/kept_ids"] <= 90
        assert line["rollout_corr/mult_prob_error"] < 1 + 1e-5, "the mean of exp(abs(d))"
        assert (line["rollout/kept_exceeded"] > 0) == (setting == "min_p=0.05")


@pytest.mark.matrix
def test_drafted_tokens_have_the_log_probabilities_of_the_trainers(tmp_path: Path) -> None:
    run(tmp_path, "rollout.speculative=3", "rollout.top_p=0.8", "rollout.max_model_len=60").assert_succeeded()
    steps = lines(tmp_path / "metrics.jsonl")
    for line in steps:
        assert line["rollout_corr/mult_prob_error"] < 1 + 1e-5, "the mean of exp(abs(d))"
    assert max(line["rollout/draft_share"] for line in steps) > 0


def scored_lengths(recorded: Path, step: int) -> tuple[list[int], int]:
    """Of a step's responses that have a score, and how many have none."""
    files = list(recorded.glob(f"{step}%2F*.npz"))
    scored = [file for file in files if int(file.name.split("%2F")[1]) % 4]
    return [len(np.load(file)["response_ids"]) for file in scored], len(files) - len(scored)


def _assert_few_frames(directory: Path) -> None:
    """There are at most 15 calls from `train` to the loss, both included, over both processes."""
    driver, worker = ((directory / name).read_text().splitlines() for name in ("driver", "worker"))
    begins = [line.startswith("train ") and line.endswith("loop/train.py") for line in driver]
    driver = driver[begins.index(True) :]
    stack = [*driver, f"submit {workers.__file__}", *worker]
    assert worker[0].startswith("run "), "the first frame of the worker"
    assert stack[-1].startswith("noted_ppo "), "the last"
    assert len(stack) <= 15, "\n".join(stack)


def _assert_tokens(recorded: Path, metrics: dict[str, float], samples: list[dict[str, Any]]) -> None:
    """The values of a step's tokens are those that the engine has written, and give the step's metrics."""
    kept = [sample for sample in samples if (sample["step"], sample["kind"]) == (metrics["step"], "train")]
    assert len(kept) == 16
    columns = {name: [np.array(sample["tokens"][name]) for sample in kept] for name in kept[0]["tokens"]}
    assert set(columns) >= {"rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages", "ratio", "clipped"}
    for sample, logprobs in zip(kept, columns["rollout_logprobs"], strict=True):
        written = np.load(recorded / f"{sample['sample_id'].replace('/', '%2F')}.npz")["rollout_logprobs"]
        np.testing.assert_allclose(logprobs, written, rtol=1e-5)
        assert sample["advantage"] is None or set(sample["tokens"]["advantages"]) == {
            float(f"{sample['advantage']:.6g}")
        }
    scored = [row for row, sample in enumerate(kept) if sample["score"] is not None]
    kl = [np.sum(columns["old_logprobs"][row] - columns["ref_logprobs"][row]) for row in scored]
    assert np.mean(kl) == pytest.approx(metrics["objective/kl"], abs=1e-4)  # of values with six digits
    ratio, clipped = (np.concatenate(columns[name]) for name in ("ratio", "clipped"))
    assert ratio.max() == pytest.approx(metrics["policy/ratio_max"], rel=1e-5)
    assert ratio.min() == pytest.approx(metrics["policy/ratio_min"], rel=1e-5)
    assert set(clipped) <= {0.0, 1.0}
    assert (clipped.sum() > 0) == (metrics["policy/clipfrac"] > 0)


def test_grpo_on_a_rule_is_the_same_with_and_without_offloading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = tmp_path / "recorded"
    kept = ("tracking.samples=all", "tracking.tokens=true")
    turns = run(tmp_path / "turns", f"rollout.record={recorded}", *kept)
    turns.assert_succeeded()
    roles = "groups.train.roles"
    monkeypatch.setenv(frames.DIRECTORY, str(tmp_path))
    stay = run(
        tmp_path / "stay",
        "rollout.sleep=false",
        f"{roles}.actor.offload=false",
        f"{roles}.reference.offload=false",
        "algo.policy_loss=tests.e2e.frames:noted_ppo",
        before="from tests.e2e.frames import note_updates; note_updates()",
    )
    assert stay.status == 0, stay.errors
    _assert_few_frames(tmp_path)

    assert "return 1 / min(int(completion.prompt_id) % every, 1)" in turns.errors
    assert turns.errors.count("gave prompt") == 1

    metrics = lines(tmp_path / "turns" / "metrics.jsonl")
    for line in metrics:
        lengths, unscored = scored_lengths(recorded, line["step"])
        assert len(lengths) + unscored == 16
        assert line["rewards/unscored"] == line["rewards/unscored/raises_once_in_a_while"] == unscored > 0
        assert line["rewards/unscored/soft_overlong"] == 0
        assert line["objective/score"] == pytest.approx(1 - np.mean(lengths) / 32, rel=1e-5)
        assert line["rollout/logprob_gap"] < 1e-5
        assert line["group/zero_std_fraction"] < 1
        assert line["policy/grad_norm"] > 0
        assert not any(name.startswith("value/") for name in line)
        _assert_tokens(recorded, line, lines(tmp_path / "turns" / "samples.jsonl"))
    first, *later = lines(tmp_path / "turns" / "evaluations.jsonl")
    assert [evaluation["step"] for evaluation in later] == [1, 2]
    for evaluation in (first, *later):
        assert evaluation["eval/soft_overlong"] == pytest.approx(-evaluation["eval/response_length"] / 32, rel=1e-5)

    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert numbers(tmp_path / "turns" / name) == numbers(tmp_path / "stay" / name), name
    mine, theirs = (load_file(tmp_path / side / "export" / "model.safetensors") for side in ("turns", "stay"))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
