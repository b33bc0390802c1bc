"""GRPO on a rule, with roles and engine that take turns on their devices; against the same run where all stay there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.runs import Finished, finish, lines, started

pytestmark = pytest.mark.e2e


def run(directory: Path, *overrides: str) -> Finished:
    with started(["train", "configs/debug/grpo.yaml", f"run.dir={directory}", *overrides]) as program:
        return finish(*program)


def test_a_rule_scores_and_taking_turns_changes_nothing(tmp_path: Path) -> None:
    recorded = tmp_path / "recorded"
    turns = run(tmp_path / "turns", f"rollout.record={recorded}")
    assert turns.status == 0, turns.errors
    turns.assert_clean()
    roles = "groups.train.roles"
    stay = run(
        tmp_path / "stay", "rollout.sleep=false", f"{roles}.actor.offload=false", f"{roles}.reference.offload=false"
    )
    assert stay.status == 0, stay.errors

    metrics = lines(tmp_path / "turns" / "metrics.jsonl")
    for line in metrics:
        lengths = [len(np.load(file)["response_ids"]) for file in recorded.glob(f"{line['step']}%2F*.npz")]
        assert len(lengths) == 16
        assert line["scores/soft_overlong"] == pytest.approx(-np.mean(lengths) / 32, rel=1e-5)
        assert line["objective/score"] == pytest.approx(line["scores/soft_overlong"], rel=1e-5)
        assert line["group/zero_std_fraction"] < 1
        assert line["policy/grad_norm"] > 0
        assert not any(name.startswith("value/") for name in line)
    for evaluation in lines(tmp_path / "turns" / "evaluations.jsonl"):
        assert evaluation["eval/soft_overlong"] == pytest.approx(-evaluation["eval/response_tokens"] / 32, rel=1e-5)

    for name in ("metrics.jsonl", "evaluations.jsonl"):
        mine, theirs = (
            [
                {key: value for key, value in line.items() if not key.startswith(("time/", "perf/", "sync/"))}
                for line in lines(tmp_path / side / name)
            ]
            for side in ("turns", "stay")
        )
        assert mine == theirs, name
    mine, theirs = (load_file(tmp_path / side / "export" / "model.safetensors") for side in ("turns", "stay"))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
