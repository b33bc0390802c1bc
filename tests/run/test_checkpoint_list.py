"""`megarl checkpoints`: which checkpoints a run has, why, and what is wrong with them."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from megarl.cli import app
from megarl.run.directory import RunDirectory
from tests.checkpoint.staging import write_roles
from tests.run.test_directory import debug

KEPT = [
    "checkpoint={every: 2, keep: 1, keep_every: 4, best: {metric: eval/length}}",
    "evaluation={prompts: a/b, functions: [{name: length}], every: 2}",
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with evaluations after every second of its eight steps."""
    path = tmp_path / "run"
    with closing(RunDirectory(debug(path, *KEPT))) as directory:
        for step, value in enumerate((0.5, 2, 1.25, None), start=1):
            with directory.evaluations.open("a") as lines:
                lines.write(json.dumps({"step": 2 * step, "eval/length": value}) + "\n")
            directory.commit(2 * step, write_roles(directory.checkpoints.stage(2 * step)), {})
    return path


def listed(run: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["checkpoints", str(run), *options], env={"COLUMNS": "200"})


def test_checkpoints_are_listed_with_the_reasons_for_which_they_stay(run: Path) -> None:
    result = listed(run)
    assert result.exit_code == 0, result.output
    heading, *rows = (line.split() for line in result.output.splitlines())
    assert heading == ["step", "written", "size", "eval/length", "kept", "because", "files"]
    assert [(row[0], row[2:]) for row in rows] == [
        ("4", ["7.8", "KiB", "2", "multiple", "of", "4,", "best", "complete"]),
        ("8", ["7.8", "KiB", "newest,", "multiple", "of", "4", "complete"]),
    ]
    assert {row[-1] for row in (line.split() for line in listed(run, "--verify").output.splitlines()[1:])} == {"intact"}


def test_damage_is_shown_and_the_exit_code(run: Path) -> None:
    """Other bytes of the same number are found with --verify alone."""
    file = run / "checkpoints/step-4/critic/1-0.bin"
    file.write_bytes(bytes(1000))
    assert listed(run).exit_code == 0
    result = listed(run, "--verify")
    assert result.exit_code == 1
    assert "critic/1-0.bin of critic rank 1 has other content than was written" in result.output
    os.truncate(file, 10)
    (run / "checkpoints/step-8/manifest.json").unlink()
    (run / "checkpoints/.step-10.staged").mkdir()
    result = listed(run)
    assert result.exit_code == 1
    for said in ("critic/1-0.bin of critic rank 1 has 10 bytes, not 1000", "manifest.json cannot be read", "step 10"):
        assert said in result.output


def test_a_directory_without_training_has_none(tmp_path: Path) -> None:
    result = listed(tmp_path)
    assert result.exit_code == 2
    assert "no run that trains" in result.output
