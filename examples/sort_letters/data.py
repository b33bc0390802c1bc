"""The data of the demo as JSONL files, from a seed: demonstrations, preference pairs, prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from random import Random

from examples.sort_letters.mistakes import DEMONSTRATED, REJECTED, wrong_answer
from examples.sort_letters.task import Question, questions

Row = Mapping[str, str]

TRAIN_ROWS: Mapping[str, int] = {"demonstrations": 20_000, "pairs": 20_000, "prompts": 4_096}
HELD_OUT_ROWS: Mapping[str, int] = {"demonstrations": 1_024, "pairs": 1_024, "prompts": 1_024}


def demonstration(question: Question, random: Random) -> Row:
    """What supervised fine-tuning imitates; most are wrong."""
    right = random.random() >= sum(DEMONSTRATED.values())
    response = question.answer if right else wrong_answer(question, random, DEMONSTRATED)
    return {"prompt": question.prompt, "response": response}


def pair(question: Question, random: Random) -> Row:
    """What the reward model learns from: the right answer, which the task's checker chose, and a wrong one."""
    return {
        "prompt": question.prompt,
        "chosen": question.answer,
        "rejected": wrong_answer(question, random, REJECTED),
    }


def prompt(question: Question, random: Random) -> Row:
    """What PPO answers."""
    return {"prompt": question.prompt}


MAKERS: Mapping[str, Callable[[Question, Random], Row]] = {
    "demonstrations": demonstration,
    "pairs": pair,
    "prompts": prompt,
}


def write_data(directory: Path, seed: int) -> None:
    """Writes a file of training rows and one of held-out rows of each kind.

    Args:
        directory: where to; it is made.
        seed: of the questions and of the mistakes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for kind, make in MAKERS.items():
        for split, rows in (("train", TRAIN_ROWS[kind]), ("held_out", HELD_OUT_ROWS[kind])):
            random = Random(f"{seed}/{kind}/{split}")
            asked = islice(questions(random, held_out=split == "held_out"), rows)
            _write(directory / f"{kind}_{split}.jsonl", (make(question, random) for question in asked))


def _write(path: Path, rows: Iterable[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
