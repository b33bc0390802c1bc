"""Concurrent and chained jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.run.attempts import read_attempts
from tests.random_models import place_random_model
from tests.slurm.jobs import LIMIT_S, ROOT, SFT, Launcher, Run

pytestmark = [pytest.mark.process, pytest.mark.e2e, pytest.mark.timeout(600)]

TWO_STEPS = (*SFT, "run.steps=2")
ALONE = (
    "configs/debug/sft.yaml",
    *("cluster.devices_per_node=1", "groups.train.devices=0", "groups.train.roles.actor={tp: 1, pp: 1}"),
    "data.evaluation=null",
)
"""Supervised fine-tuning by one process."""


def test_a_run_that_is_told_to_leave_goes_on_in_its_job(launcher: Launcher, tmp_path: Path) -> None:
    run = launcher.run(tmp_path / "run", *SFT, "run.steps=40")
    run.until(lambda: run.steps, "a step was taken")
    launcher.slurm.run("scancel", "--signal=USR1", str(run.job))
    assert run.wait("COMPLETED") == "0:0"
    first, second = read_attempts(run.directory / "attempts.jsonl")
    assert first.end is not None
    assert (first.end.reason, first.restart, second.restart) == ("preempted", 0, 1)
    assert 0 < first.end.step == second.step < 40
    assert run.end["exit_code"] == 75
    assert [step["step"] for step in run.steps] == list(range(1, 41))


def test_a_sweep_is_a_job_array_whose_jobs_share_their_nodes(launcher: Launcher, tmp_path: Path) -> None:
    for index in range(2):
        place_random_model(ROOT / SFT[0], f"run.dir={tmp_path / 'sweep' / f'cell-{index}-seed-{index + 1}'}")
    (job,) = launcher.launch(*TWO_STEPS, f"run.dir={tmp_path / 'sweep'}", "--sweep=run.seed=1,2")
    told = launcher.slurm.wait(job, "COMPLETED", limit_s=LIMIT_S)
    tasks = {int(one["ArrayTaskId"]): (int(one["JobId"]), one["ExitCode"]) for one in told}
    assert sorted(tasks) == [0, 1]
    losses, starts, ends, addresses = [], [], [], set[str]()
    for index, (number, code) in tasks.items():
        directory = tmp_path / "sweep" / f"cell-{index}-seed-{index + 1}"
        run = Run(slurm=launcher.slurm, job=number, directory=directory)
        assert code == "0:0"
        assert (tmp_path / "sweep" / "slurm" / f"{job}_{index}.out").exists()
        losses.append([step["sft/loss"] for step in run.steps])
        starts.append(run.stages["agent started"])
        ends.append(run.stages["driver ended"])
        lines = (run.logs / "attach").read_text().splitlines()
        addresses |= {line.split("RAY_ADDRESS=")[1].split()[0] for line in lines if "RAY_ADDRESS" in line}
    assert len(losses[0]) == len(losses[1]) == 2
    assert losses[0] != losses[1]
    assert max(starts) < min(ends), "one ran after the other"
    assert len(addresses) == 2


def link(directory: Path, name: str, model: str) -> str:
    """The file of a run that starts from a model."""
    file = directory / f"{name}.yaml"
    file.write_text(
        f"defaults: [{ROOT / 'configs/debug/sft.yaml'}]\nrun: {{dir: {directory / name}, steps: 2}}\nmodel: {model}\n"
    )
    return str(file)


def test_a_chained_job_starts_from_the_model_that_the_previous_job_exported(launcher: Launcher, tmp_path: Path) -> None:
    first = link(tmp_path, "first", "{}")
    second = link(tmp_path, "second", f"{{random: null, path: {tmp_path / 'first' / 'export'}}}")
    place_random_model(Path(first))
    jobs = launcher.launch(first, second, *ALONE[1:])
    assert [launcher.slurm.jobs(job)[0]["JobState"] for job in jobs][1] == "PENDING"
    for job, name in zip(jobs, ("first", "second"), strict=True):
        run = Run(slurm=launcher.slurm, job=job, directory=tmp_path / name)
        assert run.wait("COMPLETED") == "0:0"
    before, after = (Run(slurm=launcher.slurm, job=0, directory=tmp_path / name).steps for name in ("first", "second"))
    assert after[0]["sft/loss"] < before[0]["sft/loss"]
