"""MLflow and Trackio, each with its real package where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.run.sinks import ServiceSink, open_mlflow, open_trackio

CONFIG = {"run": {"steps": 2}, "algo": {"kl": {"coef": 0.5}}}


def write_twice(open_tracker: Callable[..., ServiceSink], directory: Path) -> None:
    """A step in each of two attempts, and an evaluation that ended late."""
    for step in (1, 2):
        sink = open_tracker("mine", directory, CONFIG)
        sink.write(step, {"objective/kl": 0.5 * step})
        sink.write(step - 1, {"eval/exact": 0.25})
        sink.close()


@pytest.mark.process
def test_a_run_of_mlflow_goes_on_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    for name in ("MLFLOW_DISABLE_TELEMETRY", "MLFLOW_ALLOW_FILE_STORE"):  # mlflow-skinny has no other store of its own
        monkeypatch.setenv(name, "true")
    write_twice(open_mlflow, tmp_path / "ppo")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("mine")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("ppo", "FINISHED")
    assert run.data.params == {"run.steps": "2", "algo.kl.coef": "0.5"}
    history = client.get_metric_history(run.info.run_id, "objective/kl")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.5), (2, 1.0)]
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "eval/exact")] == [0, 1]


def test_a_run_of_trackio_goes_on_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    trackio = pytest.importorskip("trackio")
    write_twice(open_trackio, tmp_path / "ppo")
    (run,) = trackio.Api().runs("mine")
    assert run.name.startswith("ppo-")
    assert run.config["algo"] == CONFIG["algo"]
    logs = trackio.sqlite_storage.SQLiteStorage.get_logs("mine", run.name)
    assert [(line["step"], line["objective/kl"]) for line in logs if "objective/kl" in line] == [(1, 0.5), (2, 1.0)]
    assert [(line["step"], line["eval/exact"]) for line in logs if "eval/exact" in line] == [(0, 0.25), (1, 0.25)]
