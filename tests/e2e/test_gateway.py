"""A run whose conversations are held by programs with OpenAI's client."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.gateway.prepare import prepare
from tests.e2e.runs import finish, lines, started

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_a_run_trains_with_a_harness(tmp_path: Path) -> None:
    """Its scores are what the harness has posted; nothing failed, and nothing is left."""
    prepare(tmp_path, steps=1)
    with started(["train", str(tmp_path / "run.yaml"), "tracking.samples=all"], writes_model=True) as run:
        finished = finish(*run)
    assert finished.status == 0, finished.errors
    finished.assert_clean()
    (step,) = lines(tmp_path / "run" / "metrics.jsonl")
    assert step["rollout/logprob_gap"] < 1e-4, "trainer and engines disagree"
    samples = lines(tmp_path / "run" / "samples.jsonl")
    assert len(samples) == 4
    for sample in samples:
        assert sample["score"] == sum(letter.isupper() for letter in sample["response"]) / 4
