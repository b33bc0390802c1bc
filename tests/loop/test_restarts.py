"""Which failures of a run are followed by a restart, and what a run does then. No process is started."""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing
from pathlib import Path

import pytest
from ray.exceptions import ActorDiedError, ObjectLostError, RayError, RayTaskError

from megarl.cluster import ray_api
from megarl.cluster.calls import WorkerError
from megarl.cluster.placement import MissingNodesError
from megarl.config import ConfigError, TrainingConfig, load
from megarl.errors import RunError
from megarl.preflight.check import check
from megarl.preflight.device_memory import check_memory
from megarl.preflight.epochs import with_steps
from megarl.run.attempts import read_attempts
from megarl.run.directory import RunDirectory
from megarl.run.restarts import IN_JOBS, Restarts
from tests.e2e.runs import lines
from tests.loop.training import SFT, Run, Strike

DIED = "train rank 1 died in actor.update.\n\nThe end of its log: ..."


def raising(error: BaseException) -> Strike:
    def strike() -> None:
        raise error

    return strike


def died() -> None:
    raise WorkerError(DIED)


def ends(directory: Path) -> list[tuple[int, int, str]]:
    """Of each attempt the step that it began after, the last one and the reason of its end."""
    found = read_attempts(directory / "attempts.jsonl")
    return [(each.step, each.end.step, each.end.reason) for each in found if each.end is not None]


def test_a_lost_process_restarts_the_run_from_its_last_checkpoint(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    directory = run(("step 2", died), ("step 4", died))
    assert ends(directory) == [(0, 1, "run error"), (0, 3, "run error"), (2, 4, "finished")]
    assert [line["step"] for line in lines(directory / "metrics.jsonl")] == [1, 2, 3, 4]
    printed = capsys.readouterr().out.splitlines()
    announced = "train rank 1 died in actor.update; restart"
    assert [line for line in printed if line.startswith(announced)] == [
        f"{announced} 1 of 3 from the beginning: there is no checkpoint yet",
        f"{announced} 2 of 3 from step 2",
    ]
    attempts = read_attempts(directory / "attempts.jsonl")
    assert [attempt.end and attempt.end.message for attempt in attempts] == [DIED, DIED, ""]
    assert attempts[0].time < attempts[1].time < attempts[2].time, "a restart began with the process"
    assert {event["pid"] for event in json.loads((directory / "trace.json").read_text())} == {1, 2, 3}
    assert json.loads((directory / "summary.json").read_text())["steps"] == 4


def test_a_finished_run_changes_nothing(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    directory = run()
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    run()
    assert "is finished: it has taken its 4 steps" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before


def test_an_object_that_the_driver_lost_with_a_node_restarts_the_run(run: Run) -> None:
    def lost() -> None:
        raise ObjectLostError("0" * 56, None, "")

    directory = run(("step 3", lost))
    assert ends(directory) == [(0, 2, "run error"), (2, 4, "finished")]
    first, _ = read_attempts(directory / "attempts.jsonl")
    assert first.end is not None
    assert first.end.message.startswith("An object of Ray's was lost, or there was no room for it: Failed to retrieve")


def test_the_limit_ends_the_run_with_the_last_failure(run: Run, tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as raised:
        run(("step 1", died), ("step 2", died), overrides=["run.max_restarts=1"])
    assert str(raised.value) == DIED
    assert ends(tmp_path / "run") == [(0, 0, "run error"), (0, 1, "run error")]


def test_a_second_failure_at_the_same_step_ends_the_run_with_both_causes(run: Run, tmp_path: Path) -> None:
    late = WorkerError("No answer within 60 s from train rank 0 in actor.update.\nRaise it.")
    with pytest.raises(RunError) as raised:
        run(("step 4", died), ("step 4", raising(late)))
    first, *_, last = str(raised.value).splitlines()
    assert first == str(late).splitlines()[0]
    assert last.endswith("It had failed after step 3: train rank 1 died in actor.update.")
    assert ends(tmp_path / "run") == [(0, 3, "run error"), (2, 3, "run error")]


def test_a_restart_that_finishes_no_step_ends_the_run_with_both_causes(run: Run) -> None:
    start = RunError("Ray did not start on this machine")
    with pytest.raises(RunError, match=r"(?s)^Ray did not start.* It had failed after step 3: train rank 1 died"):
        run(("step 4", died), ("step 3", raising(start)))


def lost_signal() -> None:
    """A SIGTERM whose exception Python drops, as the handler ran in a destructor."""

    class Destroyed:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    Destroyed()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_python_drops_while_a_run_starts_ends_it(run: Run, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run(("start", lost_signal))
    assert ends(tmp_path / "run") == [(0, 0, "interrupted")]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_run_whose_start_fails_after_a_signal_is_not_restarted(run: Run, tmp_path: Path) -> None:
    def both() -> None:
        lost_signal()
        died()

    with pytest.raises(WorkerError):
        run(("start", both))
    assert len(read_attempts(tmp_path / "run" / "attempts.jsonl")) == 1


def repeating() -> WorkerError:
    error = WorkerError("train rank 0 failed in actor.update: KeyError('x')")
    error.repeats = True
    return error


@pytest.mark.parametrize(
    "error",
    [RunError("the loss of 3 steps is not finite"), repeating(), KeyboardInterrupt(), SystemExit(143), ValueError("x")],
    ids=lambda error: type(error).__name__,
)
def test_other_ends_are_final(run: Run, tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)) as raised:
        run(("step 2", raising(error)))
    assert raised.value is error or isinstance(error, SystemExit)
    assert len(read_attempts(tmp_path / "run" / "attempts.jsonl")) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_told_to_end_while_it_ends_is_not_restarted(run: Run, tmp_path: Path, number: int) -> None:
    with pytest.raises(WorkerError):
        run(("step 2", died), ending=[lambda: os.kill(os.getpid(), number)])
    assert len(read_attempts(tmp_path / "run" / "attempts.jsonl")) == 1


@pytest.mark.parametrize(
    ("error", "repeats"),
    [
        (ActorDiedError(), False),
        (RayTaskError("update", "", RuntimeError("CUDA error: uncorrectable ECC error encountered")), False),
        (RayTaskError("update", "", ConnectionResetError("a peer is gone")), False),
        (RayTaskError("update", "", ObjectLostError("0" * 56, None, "")), False),
        (RayTaskError("update", "", ValueError("the loss is a teapot")), True),
        (RayTaskError("update", "", RunError("no space left")), True),
    ],
)
def test_errors_of_the_program_repeat_and_losses_do_not(error: RayError, repeats: bool) -> None:
    assert ray_api.repeats(error) == repeats


def joined(tmp_path: Path, *overrides: str) -> TrainingConfig:
    """Four nodes of two devices, of which two suffice."""
    cluster = "{device: cpu, nodes: 4, min_nodes: 2, devices_per_node: 2, address: auto}"
    devices = ["groups.train.devices=0-7", "groups.train.roles.actor={tp: 2, pp: 2}"]
    config = load(SFT, [f"run.dir={tmp_path}", f"cluster={cluster}", *devices, "run.max_restarts=9", *overrides])
    assert isinstance(config, TrainingConfig)
    return config


def test_a_run_goes_on_with_the_nodes_that_are_left(tmp_path: Path) -> None:
    config = joined(tmp_path, "run.steps=null", "run.epochs=2")
    config = with_steps(config, check(config))
    restarts = Restarts(config)
    with closing(RunDirectory(config)) as directory:
        with pytest.raises(MissingNodesError):
            restarts.after(MissingNodesError("too few", nodes=3), directory)  # at the first start
        restarts.after(WorkerError(DIED), directory)
        assert restarts.config == config
        line = restarts.after(MissingNodesError("too few", nodes=3), directory)
        assert line.startswith("3 of 4 nodes are left; it restarts on 2 nodes, from the beginning"), "4 divides not 6"
        fewer = restarts.config
        assert (fewer.cluster.nodes, fewer.groups["train"].devices, fewer.layout("actor").dp) == (2, "0,1,2,3", 1)
        assert fewer.steps == config.steps
        with pytest.raises(RunError, match="made no progress"):
            restarts.after(MissingNodesError("too few", nodes=1), directory)
        directory.metrics.write_text('{"step": 1}\n')
        restarts.after(WorkerError(DIED), directory)
        assert restarts.config == config, "the lost nodes may be back"


def test_a_run_must_fit_on_the_nodes_that_suffice(tmp_path: Path) -> None:
    check_memory(joined(tmp_path))
    with pytest.raises(ConfigError, match=r"cluster.min_nodes = 3\n.*the run must fit on its first 3 nodes"):
        check_memory(joined(tmp_path, "cluster.min_nodes=3"))


@pytest.mark.parametrize("variable", ["SLURM_JOB_ID", "RAY_JOB_CONFIG_JSON_ENV_VAR", None])
def test_runs_restart_by_themselves_in_jobs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    for name in ("SLURM_JOB_ID", "RAY_JOB_CONFIG_JSON_ENV_VAR"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "4711")
    config = load(SFT, [f"run.dir={tmp_path}"])
    assert isinstance(config, TrainingConfig)
    with closing(RunDirectory(config)) as directory:
        if variable is None:
            with pytest.raises(WorkerError):
                Restarts(config).after(WorkerError(DIED), directory)
        else:
            assert f"restart 1 of {IN_JOBS} " in Restarts(config).after(WorkerError(DIED), directory)
