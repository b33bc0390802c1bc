"""Standalone evaluation: command, directory, document. Its results: ``tests/e2e/test_eval.py``."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megarl.cli import app
from megarl.cluster.calls import WorkerError
from megarl.config import ConfigError, load
from megarl.run.directory import EvaluationDirectory, RunDirectory
from megarl.stages.eval import trainer
from megarl.stages.eval.config import EvalConfig
from tests.config.debug import DEBUG, REPOSITORY, debug

EVAL = DEBUG.with_stem("eval")


def configured(run: Path) -> EvalConfig:
    config = load(EVAL, [f"run.dir={run}"])
    assert isinstance(config, EvalConfig)
    return config


def test_an_interrupted_evaluation_starts_over(tmp_path: Path) -> None:
    for _ in range(2):
        with closing(EvaluationDirectory(configured(tmp_path))) as directory:
            assert not directory.evaluations.exists()
            assert not directory.tensorboard.exists()
            assert load(directory.config) == configured(tmp_path)
            directory.evaluations.write_text("{}\n")
            directory.tensorboard.mkdir()


def test_a_finished_evaluation_and_other_runs_are_kept(tmp_path: Path) -> None:
    with closing(EvaluationDirectory(configured(tmp_path / "finished"))) as directory:
        directory.summary.write_text("{}")
        directory.evaluations.write_text("{}\n")
    with closing(RunDirectory(debug(f"run.dir={tmp_path / 'training'}"))) as training:
        training.evaluations.write_text("{}\n")
    for run in ("finished", "training"):
        with pytest.raises(
            ConfigError, match=r"(?s)run\.dir = .*has nothing that would be lost.*choose another run\.dir"
        ):
            EvaluationDirectory(configured(tmp_path / run))
        assert (tmp_path / run / "evaluations.jsonl").read_text() == "{}\n"


def test_the_command_evaluates_and_ends_with_the_message_of_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[EvalConfig] = []
    monkeypatch.setattr(trainer, "evaluate", received.append)
    assert CliRunner().invoke(app, ["eval", str(EVAL), "run.dir=here"], catch_exceptions=False).exit_code == 0
    assert received == [configured(Path("here"))]

    def fail(config: EvalConfig) -> None:
        raise WorkerError("rollout engine 0 died")

    monkeypatch.setattr(trainer, "evaluate", fail)
    failed = CliRunner().invoke(app, ["eval", str(EVAL)])
    assert (failed.exit_code, failed.stderr) == (1, "rollout engine 0 died\n")


@pytest.mark.parametrize(
    ("command", "config", "fix"), [("eval", DEBUG, "megarl train"), ("train", EVAL, "megarl eval")]
)
def test_training_stages_are_refused_by_eval_and_the_other_way_round(command: str, config: Path, fix: str) -> None:
    refused = CliRunner().invoke(app, [command, str(config)])
    assert refused.exit_code == 2
    assert f"use {fix}" in refused.stderr


def test_the_documented_configuration_is_complete(tmp_path: Path) -> None:
    text = (REPOSITORY / "docs" / "evaluation.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(stage: eval\n.*?)```", text, flags=re.DOTALL)
    path = tmp_path / "mine.yaml"
    path.write_text(block, encoding="utf-8")
    model = {**debug().model.hf_config(), "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(model), encoding="utf-8")
    (tmp_path / "held_out.jsonl").touch()
    config = load(path, [f"model.path={tmp_path}", f"evaluation.prompts={tmp_path}/held_out.jsonl"])
    assert isinstance(config, EvalConfig)
    settings = re.findall(r"^\| (`[a-z_`, ]+`) \|", text, flags=re.MULTILINE)
    named = {name for row in settings for name in re.findall(r"`(\w+)`", row)}
    assert named >= set(type(config.evaluation).model_fields) - {
        "chat_template",
        "chat_template_kwargs",
        "too_long",
    }
