"""`megarl compare`: which prompts improve."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from megarl.cli import app


def write(run: Path, scores: dict[int, dict[str, list[float | None]]]) -> str:
    """A run with evaluations after some steps: scores by prompt."""
    run.mkdir()
    means = [{"step": step, "eval/exact": 0.25, "eval/exact_ci95": 0.125, "eval/length": 3} for step in scores]
    (run / "evaluations.jsonl").write_text("".join(f"{json.dumps(mean)}\n" for mean in means))
    rows = [
        {"step": step, "prompt_id": prompt, "scores": {"exact": scores}}
        for step, prompts in scores.items()
        for prompt, scores in prompts.items()
    ]
    (run / "prompt_scores.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    samples = [("evaluation", "what is [b]?"), ("train", "another prompt of this number")]
    lines = [json.dumps({"kind": kind, "prompt_id": "b", "prompt": prompt}) + "\n" for kind, prompt in samples]
    (run / "samples.jsonl").write_text("".join(lines))
    return str(run)


def compare(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["compare", *arguments], env={"COLUMNS": "200"})


@pytest.fixture
def run(tmp_path: Path) -> str:
    return write(
        tmp_path / "one",
        {
            0: {"a": [0, 1], "b": [0, 0], "c": [1, 1], "d": [None, None]},
            5: {"a": [0, 1], "b": [1, 0], "c": [1, 1], "d": [1, 1]},
            9: {"a": [0, 0], "b": [1, 1], "c": [1, None], "d": [1, 1]},
        },
    )


def lines(result: Result) -> list[list[str]]:
    assert result.exit_code == 0, result.output
    return [line.split() for line in result.stdout.splitlines()]


def counts(found: list[list[str]]) -> str:
    return next(" ".join(line) for line in found if "of" in line)


def test_a_runs_first_and_last_evaluations_are_compared_by_prompt(run: str) -> None:
    found = lines(compare(run))
    assert ["exact", "0.25", "±", "0.125", "0.25", "±", "0.125"] in found
    assert counts(found) == "exact, of 3 prompts: 1 better, 1 worse, 1 the same"
    assert ["b", "0", "1", "what", "is", "[b]?"] in found
    assert ["a", "0.5", "0"] in found


def test_steps_are_chosen(run: str) -> None:
    found = lines(compare(run, "0", "5"))
    assert counts(found) == "exact, of 3 prompts: 1 better, 0 worse, 2 the same"
    assert ["b", "0", "0.5", "what", "is", "[b]?"] in found


def test_the_last_evaluations_of_two_runs_are_compared(run: str, tmp_path: Path) -> None:
    other = write(tmp_path / "other", {9: {"a": [1], "b": [1]}})
    assert counts(lines(compare(run, other))) == "exact, of 2 prompts: 1 better, 0 worse, 1 the same"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["0", "6"], "those after 0, 5, 9"),
        (["nowhere"], "nowhere: there is no such directory; give the run.dir of a run"),
        (["5"], "a run and two steps"),
        (["0", "²"], "a run and two steps"),
    ],
)
def test_runs_that_cannot_be_compared_are_reported(run: str, arguments: list[str], reason: str) -> None:
    result = compare(run, *arguments)
    assert result.exit_code == 2
    assert reason in result.stderr
