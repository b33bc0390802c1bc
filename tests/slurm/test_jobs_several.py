"""Concurrent and chained jobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.run.attempts import read_attempts
from tests.random_models import place_random_model
from tests.slurm.jobs import ROOT, SFT, Launcher, Run

pytestmark = [pytest.mark.process, pytest.mark.e2e]

TWO_STEPS = (*SFT, "run.steps=2")


@pytest.mark.matrix
def test_two_jobs_share_their_nodes(launcher: Launcher, tmp_path: Path) -> None:
    runs = [launcher.run(tmp_path / f"seed-{seed}", *TWO_STEPS, f"run.seed={seed}") for seed in (1, 2)]
    losses, starts, ends, addresses = [], [], [], set[str]()
    for run in runs:
        assert run.wait("COMPLETED") == "0:0"
        losses.append([step["sft/loss"] for step in run.steps])
        starts.append(run.stages["agent started"])
        ends.append(run.stages["driver ended"])
        addresses.add(json.loads((run.logs / "ray.json").read_text())["address"])
    assert len(losses[0]) == len(losses[1]) == 2
    assert losses[0] != losses[1]
    assert max(starts) < min(ends), "one ran after the other"
    assert len(addresses) == 2


def link(directory: Path, name: str, model: str, steps: int) -> str:
    """The file of a run that starts from a model."""
    file = directory / f"{name}.yaml"
    run = f"{{dir: {directory / name}, steps: {steps}}}"
    file.write_text(f"defaults: [{ROOT / SFT[0]}]\nrun: {run}\nmodel: {model}\n")
    return str(file)


@pytest.mark.matrix
def test_a_chained_job_starts_from_the_model_of_a_run_that_had_to_leave(launcher: Launcher, tmp_path: Path) -> None:
    """The first job is told to leave, and goes on when Slurm has queued it again; the second waits for its end."""
    exported = f"{{random: null, path: {tmp_path / 'first' / 'export'}}}"
    files = [link(tmp_path, "first", "{}", steps=40), link(tmp_path, "second", exported, steps=2)]
    place_random_model(Path(files[0]))
    jobs = launcher.launch(*files, *SFT[1:])
    first, second = (
        Run(slurm=launcher.slurm, job=job, directory=tmp_path / name)
        for job, name in zip(jobs, ("first", "second"), strict=True)
    )
    first.until(lambda: first.steps, "a step was taken")
    launcher.slurm.run("scancel", "--signal=USR1", str(first.job))
    assert launcher.slurm.jobs(second.job)[0]["JobState"] == "PENDING"
    assert first.wait("COMPLETED") == "0:0"
    left, resumed = read_attempts(first.directory / "attempts.jsonl")
    assert left.end is not None
    assert (left.end.reason, left.restart, resumed.restart) == ("preempted", 0, 1)
    assert 0 < left.end.step == resumed.step < 40
    said = f"preempted after step {left.end.step}: it got SIGUSR1. Run the same command to continue"
    reason = f"megarl train ended with exit code 75: {said}"
    assert first.end == {"exit_code": 75, "reason": reason, "node": None}
    assert not (first.logs / "ray-head").exists()
    assert "2 processes on 2 nodes with their models" in (first.logs / "driver.log").read_text()
    driver = first.directory / "slurm" / f"{first.job}-1" / "driver.log"
    assert f"resuming after step {left.end.step}" in driver.read_text()
    assert [step["step"] for step in first.steps] == list(range(1, 41))
    assert second.wait("COMPLETED") == "0:0"
    assert second.steps[0]["sft/loss"] < first.steps[0]["sft/loss"]
