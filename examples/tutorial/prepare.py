"""Writes what the tutorial (docs/tutorial.md) starts from: `python -m examples.tutorial.prepare DIRECTORY`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from examples.sort_letters.checkpoint import write_checkpoint

LETTERS = "abcd"
ITEMS = 100
"""Prompts for each letter; of every fifth item they are held out."""


def prepare(directory: Path) -> None:
    """Writes a small random model, prompts.jsonl and held_out.jsonl."""
    write_checkpoint(directory / "model", seed=0)
    _write(directory / "prompts.jsonl", (item for item in range(ITEMS) if item % 5))
    _write(directory / "held_out.jsonl", range(0, ITEMS, 5))


def _write(path: Path, items: Iterable[int]) -> None:
    rows = ({"prompt": f"item {item}, letter {letter}:", "answer": letter} for item in items for letter in LETTERS)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
