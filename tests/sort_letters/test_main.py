"""The demo from end to end, with stages that only write files like real ones."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from examples.sort_letters import __main__ as demo
from examples.sort_letters.curves import draw_curves
from examples.sort_letters.stages import StageError

Line = Mapping[str, Any]


def write(path: Path, lines: Sequence[Line]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def evaluation(step: int, true_score: float, score: float) -> Line:
    return {
        "step": step,
        "eval/samples": 1024,
        "eval/exact_match": true_score,
        "eval/exact_match_ci95": 0.03,
        "eval/score": score,
        "eval/score_ci95": 0.04,
    }


def sample(step: int, kind: str, response: str, score: float) -> Line:
    scores = {"reward_model": 0.5, "exact_match": score}
    return {"step": step, "kind": kind, "prompt": "up dbca:", "response": response, "scores": scores}


def stage(name: str, overrides: Sequence[str], environment: Mapping[str, str], console: Console) -> None:
    """Writes the files of a stage."""
    run_dir = Path(next((o.removeprefix("run.dir=") for o in overrides if "run.dir=" in o), f"runs/demo/{name}"))
    metrics = {"sft": "sft/loss", "reward_model": "reward_model/accuracy", "ppo": "objective/score"}[name]
    shared = {metrics: 0.5, "objective/kl": 0.1, "value/explained_variance": 0.2}
    write(run_dir / "metrics.jsonl", [{"step": step, **shared} for step in (1, 2)])
    (run_dir / "summary.json").write_text(json.dumps({"seconds": 2.0}))
    if name == "reward_model":
        write(run_dir / "evaluations.jsonl", [{"step": 0, "eval/accuracy": 0.5}, {"step": 2, "eval/accuracy": 0.97}])
    if name == "ppo":
        rises = 0.0 if "reward.shuffle=true" in overrides else 0.5
        write(run_dir / "evaluations.jsonl", [evaluation(step, 0.35 + rises * step / 2, step) for step in (0, 1, 2)])
        shown = [sample(0, "evaluation", "dcba", 0.0), sample(1, "train", "dabc", 0.0)]
        gate = {"sync/logprob_mean_abs_diff": 1e-6, "sync/logprob_max_abs_diff": 3e-6}
        (run_dir / "summary.json").write_text(json.dumps({"start": gate, "seconds": 2.0}))
        write(run_dir / "samples.jsonl", [*shown, sample(2, "evaluation", "abcd", 1.0)])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory like the repository's, in which stages only write files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs" / "demo").mkdir(parents=True)
    monkeypatch.setattr(demo, "train", stage)
    monkeypatch.setattr(demo, "raise_on_sigterm", lambda: None)
    monkeypatch.setattr(demo, "make_inputs", lambda seed, console: 1.0)
    monkeypatch.setattr(demo, "draw_curves", lambda directory, path: None)
    return tmp_path / "runs" / "demo"


def run(*arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "120"}).invoke(demo.app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_results_are_shown_and_summarised(place: Path) -> None:
    output = run("--seed", "2")
    summary = json.loads((place / "summary.json").read_text())
    assert summary["seed"] == 2
    assert (summary["true_score_before"], summary["true_score_after"]) == (0.35, 0.85)
    assert (summary["reward_model_score_before"], summary["reward_model_score_after"]) == (0, 2)
    assert summary["reward_model_accuracy"] == 0.97
    assert (summary["sync_logprob_mean_abs_diff"], summary["sync_logprob_max_abs_diff"]) == (1e-6, 3e-6)
    assert summary["seconds"] == {"data": 1.0, "sft": 2.0, "reward_model": 2.0, "ppo": 2.0}
    assert summary["peak_memory_gb"] >= 0
    change = f"+0.500 ± {math.sqrt(0.03**2 + 0.03**2):.3f}"
    assert re.search(rf"true score\W+0.350 ± 0.030\W+0.850 ± 0.030\W+{re.escape(change)}", output)
    assert re.search(r"up dbca:\W+dcba\W+abcd", output)
    assert "dabc" not in output


@pytest.mark.process  # matplotlib looks for the fonts of the machine where it has no cache of them
def test_curves_are_drawn(place: Path) -> None:
    run()
    draw_curves(place, place / "curves.png")
    assert (place / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_every_stage_has_the_seed_and_the_overrides(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Sequence[str]]] = []

    def noted(name: str, overrides: Sequence[str], *rest: Any) -> float:
        calls.append((name, overrides))
        return stage(name, overrides, *rest)

    monkeypatch.setattr(demo, "train", noted)
    run("--seed", "1", "run.steps=2")
    assert calls == [(name, ["run.seed=1", "run.steps=2"]) for name in ("sft", "reward_model", "ppo")]


def test_files_of_an_earlier_demo_are_removed(place: Path) -> None:
    place.mkdir(parents=True)
    (place / "old").touch()
    run()
    assert not (place / "old").exists()


def test_the_control_run_leaves_the_demo_unchanged(place: Path) -> None:
    run()
    files = {file: file.read_bytes() for file in place.rglob("*") if file.is_file()}
    output = run("--control")
    assert {file: file.read_bytes() for file in files} == files
    assert re.search(r"true score\W+0.350 ± 0.030\W+0.350 ± 0.030\W+\+0.000 ± 0.042", output)
    assert (place / "control" / "evaluations.jsonl").exists()


def test_a_failed_stage_ends_the_demo_with_its_status(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_arguments: Any) -> float:
        raise StageError("sft", 3)

    monkeypatch.setattr(demo, "train", fails)
    result = CliRunner().invoke(demo.app, [])
    assert (result.exit_code, result.output.splitlines()[-1]) == (3, "the stage sft ended with status 3")


def test_outside_the_repository_it_says_where_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(demo.app, [])
    assert result.exit_code == 2
    assert "configs/demo" in result.output
