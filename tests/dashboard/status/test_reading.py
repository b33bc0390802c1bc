"""Reading a directory: numbers by hand, and malformed files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.dashboard.status.reading import Pace, Progress, RunStatus, find_runs, measure_pace, read_status
from megarl.errors import UsageError
from tests.dashboard.status.directories import NOW, MadeRun


@pytest.fixture
def run(tmp_path: Path) -> Iterator[MadeRun]:
    """A run whose process holds its lock."""
    made = MadeRun(tmp_path / "run")
    with made.locked():
        yield made


def read(run: MadeRun) -> RunStatus:
    return read_status(run.path, NOW, "login")


def line(written: float, seconds: float = 1.0) -> dict[str, float]:
    return {"time/written": written, "time/step": seconds}


def test_pace_is_measured_in_wall_clock_time() -> None:
    """100, 40 and 100 s; the 1000 s between two attempts belong to no step, and a first step has its own duration."""
    lines = [line(100), line(200), line(240), line(1240), line(1340)]
    assert measure_pace(lines, [0, 900]) == Pace(steps=3, seconds_per_step=80, longest=100)
    assert measure_pace([line(100, 4.0), line(500, 8.0)], [0, 300]) == Pace(steps=2, seconds_per_step=6, longest=8)
    assert measure_pace([{"time/step": 4.0}], []) == Pace(steps=1, seconds_per_step=4, longest=4)
    for lines in ([], [{"step": 1}], [{"time/step": None}]):
        assert measure_pace(lines, [0]) is None


def test_pace_covers_the_last_fifty_steps(run: MadeRun) -> None:
    run.start(1, ago=10**6)
    run.steps(49, ago=4000, apart=1000)
    run.steps(99, ago=10, apart=20, first=50)
    assert read(run).troubles == []
    assert read(run).progress.pace == Pace(steps=49, seconds_per_step=20, longest=20)


def test_the_remaining_time_follows_from_the_step_time(run: MadeRun) -> None:
    run.start(1, ago=9000)
    run.steps(40, ago=20, apart=60)
    found = read(run)
    progress = found.progress
    assert (progress.step, progress.steps, progress.stepped, found.written) == (40, 100, NOW - 20, NOW - 20)
    assert found.seconds_left == 60 * 60 - 20
    later = read_status(run.path, NOW + 161, "login")
    assert later.seconds_left == 59 * 60, "a late step counts as almost taken"


def test_an_unfinished_checkpoint_is_named(run: MadeRun) -> None:
    assert (read(run).checkpoints, read(run).unfinished) == ([], None)
    run.checkpoint(40, 2)
    (run.path / "checkpoints" / ".step-47.staged").mkdir()
    found = read(run)
    assert ([(saved.step, saved.nbytes) for saved in found.checkpoints], found.unfinished) == ([(40, 2)], 47)


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
    assert found.progress == Progress(step=0, steps=100, stepped=None, pace=None)
    assert (found.state.name, found.metrics, found.attempts) == ("running", {}, [])


def test_the_logs_of_the_job_are_named(run: MadeRun) -> None:
    assert read(run).job_logs is None
    run.job("4711-2")
    assert read(run).job_logs == str(run.path / "slurm"), "no attempt says which"
    run.start(1, ago=900, job="4711", restart=2)
    assert read(run).job_logs == str(run.path / "slurm" / "4711-2")
    run.start(2, ago=90, job="4712")
    assert read(run).job_logs is None, "the job has no agents"


def test_a_directory_of_runs_lists_them_in_order(tmp_path: Path) -> None:
    for name in ("seed-2", "seed-0"):
        MadeRun(tmp_path / name)
    (tmp_path / "seed-1" / "slurm").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    assert [path.name for path in find_runs(tmp_path)] == ["seed-0", "seed-1", "seed-2"]
    assert find_runs(tmp_path / "seed-1") == [tmp_path / "seed-1"]


def test_a_job_that_ended_before_its_run_began_is_found_by_its_directory(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run")
    for path in [*run.path.iterdir()]:
        path.unlink()
    with pytest.raises(UsageError, match="no run is there"):
        find_runs(run.path)
    run.job("4711-0")
    assert find_runs(run.path) == find_runs(tmp_path) == [run.path]
    found = read(run)
    assert (found.state.name, found.job_logs, found.stage) == ("waiting", str(run.path / "slurm"), None)


def test_a_directory_without_a_run_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, message in (("none", "there is no such directory"), ("file", "a file"), (".", "no run is there")):
        with pytest.raises(UsageError, match=message):
            find_runs(tmp_path / path)
