"""`megarl init` writes a run that is accepted as it stands."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from examples.sort_letters.checkpoint import write_checkpoint
from megarl.cli import app
from megarl.config import load
from megarl.preflight.check import check
from megarl.stages.ppo.config import PPOConfig


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the demo's model."""
    write_checkpoint(tmp_path / "model", seed=0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("mine_reward", "rewards"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


def init(*arguments: str, row: dict[str, Any], answers: str = "") -> int:
    Path("prompts.jsonl").write_text(json.dumps(row) + "\n")
    return CliRunner().invoke(app, ["init", *arguments], input=answers).exit_code


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"prompt": "up kdxbq:", "answer": "bdkqx"}, {}),
        ({"question": "up kdxbq:", "solution": "bdkqx"}, {"prompt": "question"}),
        ({"prompt": "up kdxbq:"}, {}),
    ],
)
def test_its_files_are_accepted_and_its_test_passes(row: dict[str, Any], columns: dict[str, str]) -> None:
    assert init("mine", "--model", "model", "--prompts", "prompts.jsonl", row=row) == 0
    config = load("mine.yaml", ["data.prompts_per_step=1"], check)
    assert isinstance(config, PPOConfig)
    assert config.data.prompts is not None
    assert config.data.prompts.columns == columns
    tests = [value for name, value in runpy.run_path("test_mine_reward.py").items() if name.startswith("test_")]
    assert len(tests) == 1
    tests[0]()


def test_it_prompts_for_missing_values() -> None:
    assert init("mine", "--from", "dapo", row={"prompt": "up kdxbq:"}, answers="model\nprompts.jsonl\n") == 0
    assert Path("mine_reward.py").exists()
    assert "defaults: [dapo]" in Path("mine.yaml").read_text()


def test_where_nobody_answers_the_options_are_named() -> None:
    asked = CliRunner().invoke(app, ["init", "mine", "--model", "model"], input="")
    assert asked.exit_code == 2
    assert asked.stderr.endswith("megarl init: no answer; give --model DIR and --prompts FILE\n")


def test_paths_and_names_that_are_wrong_are_corrected() -> None:
    Path("prompts.jsonl").write_text('{"prompt": "a"}')
    wrong = ["mine", "--model", "Qwen/Qwen3-0.6B", "--prompts", "prompt.jsonl", "--from", "gropo"]
    output = CliRunner().invoke(app, ["init", *wrong]).output
    assert "hf download Qwen/Qwen3-0.6B --local-dir Qwen/Qwen3-0.6B" in output
    assert "a JSONL file of prompts (No such file or directory)" in output
    assert "did you mean prompts.jsonl?" in output
    assert "did you mean grpo?" in output


def test_a_model_with_other_files_is_reported_or_accepted(directory: Path) -> None:
    arguments = ["mine", "--model", "model", "--prompts", "prompts.jsonl"]
    settings = directory / "model" / "tokenizer_config.json"
    settings.write_text("{")
    assert init(*arguments, row={"prompt": "a"}) == 2
    settings.unlink()
    config = directory / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": None}))
    assert init(*arguments, row={"prompt": "a"}) == 0


def test_it_overwrites_nothing() -> None:
    Path("mine_reward.py").write_text("mine")
    assert init("mine", "--model", "model", "--prompts", "prompts.jsonl", row={"prompt": "a"}) == 2
    assert Path("mine_reward.py").read_text() == "mine"
    assert not Path("mine.yaml").exists()
