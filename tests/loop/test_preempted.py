"""What a run does between two steps, and after a signal, a finding or skipped steps."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from megarl.errors import PreemptedError, RunError
from tests.loop.training import FakeTrainer, Run


def preempted(run: Run, phase: str, *overrides: str) -> list[str]:
    """What a run does that gets a signal in a phase; the ranks write what they save when they are waited for."""
    settings = ["checkpoint={every: null, async_save: true}", *overrides]
    with pytest.raises(PreemptedError):
        run((phase, lambda: os.kill(os.getpid(), signal.SIGTERM)), overrides=settings)
    return FakeTrainer.done


@pytest.mark.parametrize(
    ("phase", "overrides", "last"),
    [
        ("step 1", [], 1),
        ("step 2", [], 2),
        ("evaluation 2", [], 2),
        ("checkpoint 2", ["checkpoint.every=2"], 2),
    ],
)
def test_a_run_finishes_its_step_evaluates_and_saves(
    run: Run, tmp_path: Path, phase: str, overrides: Sequence[str], last: int
) -> None:
    expected = ["start", "evaluation 0", "step 1", "step 2", "evaluation 2"]
    if last == 1:
        expected = expected[:3]
    assert preempted(run, phase, *overrides) == [*expected, f"checkpoint {last}"]
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == [f"step-{last}"], "it is committed"


@pytest.mark.parametrize("phase", [None, "step 4", "checkpoint 4"])
def test_a_run_after_its_last_step_exports(run: Run, phase: str | None) -> None:
    """Also with a signal."""
    strikes = [] if phase is None else [(phase, lambda: os.kill(os.getpid(), signal.SIGTERM))]
    run(*strikes, overrides=["checkpoint.every=null"])
    assert FakeTrainer.done[-4:] == ["step 4", "evaluation 4", "checkpoint 4", "export"]


def end_of(run: Run, skipped: Sequence[int], *overrides: str) -> tuple[str, list[int]]:
    """The error of a run of nine steps some of which skip their update, and the steps that it saved."""
    updates: Mapping[int, Mapping[str, float]] = {
        step: {"sft/skipped": float(step in skipped)} for step in range(1, 10)
    }
    settings = ["run.steps=9", "checkpoint.every=4", *overrides]
    with pytest.raises(RunError) as caught:
        run(overrides=settings, updates=updates)
    saves = [what for what in FakeTrainer.done if what.startswith("checkpoint")]
    return str(caught.value), [int(save.split()[1]) for save in saves]


def test_a_finding_ends_a_run_after_a_checkpoint_if_configured(run: Run) -> None:
    error, saved = end_of(run, [5, 6, 7], "health.stop=[skipped]")
    assert error.startswith("health.stop: updates were skipped (sft)")
    assert saved == [4, 5], "it comes before the limit of skipped steps"


def test_skipped_steps_end_a_run_without_a_checkpoint_of_them(run: Run, tmp_path: Path) -> None:
    error, saved = end_of(run, [2, 6, 7, 8])
    assert error.startswith("sft: the loss or the gradient was not finite in 3 optimizer steps in a row")
    assert saved == [4]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 8
