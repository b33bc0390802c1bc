"""The whole demo with two steps per stage, with the package as pip installs it: files, stages and final results."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.e2e.runs import ROOT, lines

pytestmark = pytest.mark.e2e

HELD_OUT = 128
DEMO = f"""\
from examples.sort_letters import data; data.HELD_OUT_ROWS = dict.fromkeys(data.HELD_OUT_ROWS, {HELD_OUT}); \
from examples.sort_letters.__main__ import app; app()"""
"""The demo with fewer held-out rows."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip install .` installs, without bytecode; the dependencies are those of the environment."""
    base = tmp_path_factory.mktemp("package")
    source, target = base / "source", base / "installed"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "megarl", source / "megarl", ignore=ignored)  # pip would leave build/ in the repository
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    options = ["--no-deps", "--no-build-isolation", "--no-compile", "--target", str(target), str(source)]
    subprocess.run([sys.executable, "-m", "pip", "install", "-qq", *options], check=True)
    return target


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, installed: Path) -> Path:
    """The directory in which the demo ran."""
    place = tmp_path_factory.mktemp("demo")
    for folder in ("configs", "examples"):
        (place / folder).symlink_to(ROOT / folder)
    command = [sys.executable, "-c", DEMO, "--seed", "1", "run.steps=2"]
    environment = {**os.environ, "PYTHONPATH": str(installed), "COLUMNS": "120"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (place / "output").write_text(done.stdout)
    return place


@pytest.fixture
def demo(place: Path) -> Path:
    return place / "runs" / "demo"


def test_driver_trainers_and_engines_run_the_installed_package(place: Path, installed: Path) -> None:
    """They have compiled it; its recipes and templates are files, not links."""
    for module in ("stages/ppo/trainer", "megatron/worker", "rollout/engine"):
        folder, name = (installed / "megarl" / module).parent, Path(module).name
        assert list((folder / "__pycache__").glob(f"{name}.*.pyc")), module
    for folder, own in (("recipes", "configs/recipes"), ("launch/templates", "slurm")):
        names = {file.name for file in (ROOT / own).iterdir()}
        assert {file.name for file in (installed / "megarl" / folder).iterdir()} == names, folder


def test_summary(demo: Path) -> None:
    summary = json.loads((demo / "summary.json").read_text())
    assert summary["seed"] == 1
    assert all(0 <= summary[key] <= 1 for key in ("true_score_before", "true_score_after", "reward_model_accuracy"))
    assert 0 < summary["sync_logprob_mean_abs_diff"] <= summary["sync_logprob_max_abs_diff"] < 1e-4
    assert set(summary["seconds"]) == {"data", "sft", "reward_model", "ppo"}
    assert 1 < summary["peak_memory_gb"] < 12


def test_the_results_are_printed_and_drawn(place: Path, demo: Path) -> None:
    output = (place / "output").read_text()
    assert f"{HELD_OUT} held-out prompts" in output
    assert (demo / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_exports_are_models_of_transformers(demo: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo / "ppo" / "export")
    ids = torch.tensor([tokenizer.encode("up kdxbq:")])
    answers, start = (AutoModelForCausalLM.from_pretrained(demo / name) for name in ("ppo/export", "sft/export"))
    judge = AutoModelForSequenceClassification.from_pretrained(demo / "reward_model" / "export")
    with torch.no_grad():
        change = (answers(ids).logits - start(ids).logits).abs().max()
        assert 1e-5 < change < 1.0  # trained, from the fine-tuned model on
        assert judge(ids).logits.shape == (1, 1)


def test_scores_are_of_unit_scale_over_answers_of_the_fine_tuned_model(demo: Path) -> None:
    before = lines(demo / "ppo" / "evaluations.jsonl")[0]
    deviation = before["eval/score_ci95"] / 1.96 * before["eval/samples"] ** 0.5
    assert before["eval/score"] == pytest.approx(0, abs=0.3)
    assert deviation == pytest.approx(1, abs=0.3)
