"""The demo's training files, and that they contain nothing held out."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from examples.sort_letters import data
from examples.sort_letters.data import HELD_OUT_ROWS, MAKERS, TRAIN_ROWS, write_data
from examples.sort_letters.task import Question

Rows = dict[str, list[dict[str, str]]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo") / "data"
    write_data(directory, seed=1)
    return directory


@pytest.fixture(scope="module")
def rows(directory: Path) -> Rows:
    files = sorted(directory.iterdir())
    return {file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in files}


def letter_sets(rows: list[dict[str, str]]) -> set[frozenset[str]]:
    """Read from the prompts' text."""
    return {frozenset(row["prompt"].split()[1].rstrip(":")) for row in rows}


def right(row: dict[str, str], column: str) -> bool:
    direction, letters = row["prompt"].rstrip(":").split()
    return list(row[column]) == sorted(letters, reverse=direction == "down")


def test_files_and_their_rows(rows: Rows) -> None:
    assert {name: len(found) for name, found in rows.items()} == {
        **{f"{kind}_train": TRAIN_ROWS[kind] for kind in MAKERS},
        **{f"{kind}_held_out": HELD_OUT_ROWS[kind] for kind in MAKERS},
    }


def test_no_held_out_letters_in_any_training_file(rows: Rows) -> None:
    trained = set[frozenset[str]]().union(*(letter_sets(found) for name, found in rows.items() if "train" in name))
    held_out = set[frozenset[str]]().union(*(letter_sets(found) for name, found in rows.items() if "held" in name))
    assert len(trained) > 20_000
    assert len(held_out) > 2_000
    assert not trained & held_out


def test_no_prompt_twice_in_a_file(rows: Rows) -> None:
    assert all(len({row["prompt"] for row in found}) == len(found) for found in rows.values())


def test_prompts_do_not_reveal_the_answer(rows: Rows) -> None:
    assert all(set(row) == {"prompt"} for name in ("prompts_train", "prompts_held_out") for row in rows[name])


def test_35_percent_of_the_demonstrations_are_right_and_most_others_go_the_wrong_way(rows: Rows) -> None:
    found = rows["demonstrations_train"]
    answers = [Question.parse(row["prompt"]).answer for row in found]
    backwards = sum(row["response"] == answer[::-1] for row, answer in zip(found, answers, strict=True))
    assert sum(right(row, "response") for row in found) / len(found) == pytest.approx(0.35, abs=0.012)  # 3.5 deviations
    assert backwards / len(found) == pytest.approx(0.40, abs=0.015)


def test_chosen_is_correct_and_rejected_is_wrong(rows: Rows) -> None:
    pairs = rows["pairs_train"] + rows["pairs_held_out"]
    assert all(right(row, "chosen") and not right(row, "rejected") for row in pairs)


def test_the_data_is_determined_by_the_seed(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digests(place: Path) -> list[str]:
        return [hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(place.iterdir())]

    write_data(tmp_path / "same", seed=1)
    assert digests(tmp_path / "same") == digests(directory)
    monkeypatch.setattr(data, "TRAIN_ROWS", dict.fromkeys(TRAIN_ROWS, 10))
    monkeypatch.setattr(data, "HELD_OUT_ROWS", dict.fromkeys(HELD_OUT_ROWS, 10))
    write_data(tmp_path / "other", seed=2)
    write_data(tmp_path / "one", seed=1)
    assert not set(digests(tmp_path / "other")) & set(digests(tmp_path / "one"))
