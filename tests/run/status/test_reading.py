"""Reading a directory: numbers by hand, and malformed files."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.run.status.jobs import Submission, record_submission
from megarl.run.status.reading import CheckpointState, RunStatus, StatusError, find_runs, read_status
from megarl.run.status.throughput import Throughput, measure_throughput
from tests.run.status.directories import NOW, MadeRun


@pytest.fixture
def run(tmp_path: Path) -> Iterator[MadeRun]:
    """A run whose process holds its lock."""
    made = MadeRun(tmp_path / "run")
    with (made.path / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield made


def read(run: MadeRun) -> RunStatus:
    return read_status(run.path, NOW, "login")


def line(written: float, seconds: float = 1.0) -> dict[str, float]:
    return {"time/written": written, "time/step": seconds}


def test_throughput_is_measured_in_wall_clock_time() -> None:
    """100, 40 and 100 s; the 1000 s between two attempts belong to no step."""
    lines = [line(100), line(200), line(240), line(1240), line(1340)]
    assert measure_throughput(lines, [0, 900]) == Throughput(
        steps=3, seconds_per_step=80, longest=100, steps_per_hour=45
    )


def test_the_first_steps_use_their_own_durations() -> None:
    assert measure_throughput([line(100, 4.0)], [0]) == Throughput(
        steps=1, seconds_per_step=4, longest=4, steps_per_hour=900
    )
    assert measure_throughput([line(100, 4.0), line(500, 8.0)], [0, 300]) == Throughput(
        steps=2, seconds_per_step=6, longest=8, steps_per_hour=600
    )
    assert measure_throughput([{"time/step": 4.0}], []) == Throughput(
        steps=1, seconds_per_step=4, longest=4, steps_per_hour=900
    )
    assert (
        measure_throughput([], [0])
        is measure_throughput([{"step": 1}], [0])
        is measure_throughput([{"time/step": None}], [])
        is None
    )


def test_throughput_covers_the_last_fifty_steps(run: MadeRun) -> None:
    run.start(1, ago=10**6)
    run.steps(49, ago=4000, apart=1000)
    run.steps(99, ago=10, apart=20, first=50)
    assert read(run).progress.pace == Throughput(steps=49, seconds_per_step=20, longest=20, steps_per_hour=180)


def test_the_remaining_time_follows_from_the_step_time(run: MadeRun) -> None:
    run.start(1, ago=9000)
    run.steps(40, ago=20, apart=60)
    found = read(run)
    assert (found.progress.step, found.progress.steps, found.progress.stepped, found.written) == (
        40,
        100,
        NOW - 20,
        NOW - 20,
    )
    assert found.seconds_left == 60 * 60 - 20
    assert found.overdue is None


@pytest.mark.parametrize(("ago", "overdue"), [(179, None), (181, 181)])
def test_a_step_is_overdue_after_three_times_the_longest(run: MadeRun, ago: float, overdue: float | None) -> None:
    run.start(1, ago=9000)
    run.steps(40, ago=ago, apart=60)
    found = read(run)
    assert found.overdue == overdue
    assert found.seconds_left == 59 * 60


def test_an_evaluation_or_a_checkpoint_is_a_sign_of_life(run: MadeRun) -> None:
    run.start(1, ago=9000)
    run.steps(40, ago=500, apart=60)
    run.evaluation(40, ago=30, score=1.0)
    assert read(run).overdue is None


def test_an_attempt_without_a_step_is_not_overdue(run: MadeRun) -> None:
    run.start(1, ago=9000)
    run.steps(40, ago=5000, apart=60)
    run.start(2, ago=1000, step=40)
    assert read(run).overdue is None


def test_steps_that_a_resume_would_repeat(run: MadeRun) -> None:
    run.start(1, ago=9000)
    run.steps(47, ago=20, apart=60)
    assert read(run).saved == CheckpointState(step=0, writing=None, again=47, seconds=47 * 60, checkpoints=[])
    run.checkpoint(20)
    run.checkpoint(40)
    (run.path / "checkpoints" / ".step-47.staged").mkdir()
    saved = read(run).saved
    assert saved is not None
    assert (saved.step, saved.writing, saved.again, saved.seconds) == (40, 47, 7, 7 * 60)


def test_checkpoints_have_sizes_and_reasons(run: MadeRun) -> None:
    with (run.path / "config.yaml").open("a") as config:
        config.write("checkpoint: {keep: 1, keep_every: 20, best: {metric: eval/score, mode: max}}\n")
    run.evaluation(20, ago=60, score=0.9)
    run.evaluation(40, ago=50, score=0.5)
    for step in (20, 40, 47):
        run.checkpoint(step)
    (run.path / "checkpoints" / "step-40" / "state.json").write_text("{}")
    saved = read(run).saved
    assert saved is not None
    assert [(found.step, found.nbytes, tuple(found.kept)) for found in saved.checkpoints] == [
        (20, 0, ("multiple of 20", "best")),
        (40, 2, ("multiple of 20",)),
        (47, 0, ("newest",)),
    ]


def test_warnings_are_named(run: MadeRun) -> None:
    for step in range(1, 61):
        bad = step in (5, 57, 58)  # the first is long past
        run.step(
            step,
            ago=100 - step,
            policy__skipped=0.25 if bad else 0.0,
            value__skipped=0.0,
            rewards__unscored=3 if bad else 0,
            rollout__samples=16,
            policy__loss=None if step in (5, 60) else 1.0,
        )
    logs = run.path / "logs"
    logs.mkdir()
    (logs / "train-rank-0.log").touch()
    (logs / "train-rank-1.log").write_text("Traceback")
    starts = [
        "since step 57: 3 of 16 responses have no score",
        "since step 57: updates were skipped (policy)",
        "since step 60: not a finite number: policy/loss",
        f"printed into {logs}: train-rank-1.log",
    ]
    troubles = read(run).troubles
    assert [trouble[: len(start)] for trouble, start in zip(troubles, starts, strict=True)] == starts


def test_a_healthy_run_has_no_warnings(run: MadeRun) -> None:
    run.steps(40, ago=20, apart=60)
    assert read(run).troubles == []


@pytest.mark.parametrize("rest", ["", '{"step": 4, "obj', "\0\0\0\n", "[]\n", '{"version": 4}\n'])
def test_an_incomplete_line_is_skipped(run: MadeRun, rest: str) -> None:
    run.steps(3, ago=20, apart=60)
    with (run.path / "metrics.jsonl").open("a") as lines:
        lines.write(rest)
    assert read(run).progress.step == 3


@pytest.mark.parametrize("config", ["", "stage: [", "7\n", "stage: ppo\nrun: 3\n"])
def test_an_unreadable_configuration_does_not_hide_the_rest(run: MadeRun, config: str) -> None:
    run.steps(3, ago=20, apart=60)
    (run.path / "config.yaml").write_text(config)
    found = read(run)
    assert (found.progress.step, found.progress.steps, found.seconds_left) == (3, None, None)


def test_an_empty_run_has_empty_fields(run: MadeRun) -> None:
    for name in ("metrics.jsonl", "evaluations.jsonl", "attempts.jsonl"):
        (run.path / name).touch()
    found = read(run)
    assert (
        found.state.name,
        found.progress.step,
        found.progress.steps,
        found.progress.pace,
        found.progress.stepped,
    ) == ("running", 0, 100, None, None)
    assert (found.metrics, found.evaluation, found.attempts) == ({}, {}, [])


def test_the_logs_of_the_last_job_are_named(run: MadeRun) -> None:
    assert read(run).job_logs is None
    for name in ("99-0", "4711-0", "4711-10", "4711-2"):
        run.job(name)
    assert read(run).job_logs == str(run.path / "slurm" / "4711-10")


def test_a_sweep_lists_its_runs_in_order(tmp_path: Path) -> None:
    for cell in (10, 2, 0):
        MadeRun(tmp_path / f"cell-{cell}-seed-{cell}")
    submitted = tmp_path / "cell-1" / "slurm"
    submitted.mkdir(parents=True)
    (submitted / "config-0123abcd.yaml").touch()
    (tmp_path / "slurm").mkdir()
    assert [path.name for path in find_runs(tmp_path)] == [
        "cell-0-seed-0",
        "cell-1",
        "cell-2-seed-2",
        "cell-10-seed-10",
    ]
    assert find_runs(submitted.parent) == [submitted.parent]


def test_a_job_that_ended_before_its_run_began_is_found_by_its_directory(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run")
    for path in [*run.path.iterdir()]:
        path.unlink()
    assert_no_run(run.path)
    logs = run.job("4711-0")
    assert find_runs(run.path) == find_runs(tmp_path) == [run.path]
    found = read(run)
    assert (found.state.name, found.job_logs, found.stage) == ("waiting", str(logs), None)
    logs.rename(run.path / "slurm" / "old-runs")
    assert_no_run(run.path)


def assert_no_run(path: Path) -> None:
    with pytest.raises(StatusError, match="no run is there"):
        find_runs(path)


def test_a_directory_without_a_run_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    (tmp_path / "first").mkdir()
    for path, told in (
        (tmp_path / "none" / "first", "there is no such directory; give the run.dir"),
        (tmp_path / "firs", f"there is no such directory; did you mean {tmp_path / 'first'}\\?"),
        (file, "a file"),
        (tmp_path, "no run is there"),
    ):
        with pytest.raises(StatusError, match=told):
            find_runs(path)


def test_a_submission_is_shown_until_it_starts(run: MadeRun) -> None:
    run.file("slurm/config-0.yaml", 30, "stage: sft")
    record_submission(run.path / "slurm", "4711")
    os.utime(run.path / "slurm" / "submitted.json", (NOW - 20, NOW - 20))
    assert read(run).submitted == Submission(job="4711", time=NOW - 20)
    run.start(1, ago=10)
    assert read(run).submitted is None


def test_a_submission_whose_job_has_logs_has_started(run: MadeRun) -> None:
    run.job("4711-0")
    record_submission(run.path / "slurm", "4711")  # as Slurm was faster
    assert read(run).submitted is None


def test_a_submission_that_cannot_be_recorded_still_succeeds(run: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    record_submission(run.path / "nowhere", "4711")
    assert capsys.readouterr().err.endswith("megarl status will not know of job 4711\n")


def test_a_run_that_has_not_started_shows_the_last_submission(run: MadeRun) -> None:
    (run.path / "config.yaml").unlink()
    (run.path / "slurm").mkdir()
    for name, steps, ago in (("0", 5, 30), ("1", 6, 10), ("2", 7, 20)):
        file = run.path / "slurm" / f"config-{name}.yaml"
        file.write_text(f"stage: sft\nrun: {{steps: {steps}}}\n")
        os.utime(file, (NOW - ago, NOW - ago))
    found = read(run)
    assert (found.stage, found.progress.steps) == ("sft", 6)
    assert found.submitted == Submission(job=None, time=NOW - 10)
    run.file("slurm/submitted.json", 9, "{")
    assert read(run).submitted == Submission(job=None, time=NOW - 10)
