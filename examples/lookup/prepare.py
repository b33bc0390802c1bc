"""Writes what the example starts from: `python -m examples.lookup.prepare DIRECTORY`."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from examples.lookup.table import KEYS
from examples.sort_letters.checkpoint import write_checkpoint

DEMONSTRATIONS = 4096
ASKS_WELL, ANSWERS_WELL = 0.4, 0.6
"""Fractions of the demonstrations: others have a random key, and a random value."""


def prepare(directory: Path, seed: int = 0) -> None:
    """Writes a small random model, and demonstrations of single turns."""
    write_checkpoint(directory / "model", seed)
    with (directory / "demonstrations.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in _demonstrations(random.Random(seed)))


def _demonstrations(chance: random.Random) -> Iterable[Mapping[str, str]]:
    for _ in range(DEMONSTRATIONS // 2):
        key, value, other = chance.choice(KEYS), chance.randrange(100), chance.randrange(100)
        asked = key if chance.random() < ASKS_WELL else chance.choice(KEYS)
        answer = value if chance.random() < ANSWERS_WELL else other
        yield {"prompt": f"{key}>", "response": f"?{asked}"}
        yield {"prompt": f"{key}>?{asked}<eos>={value:02}>", "response": f"{answer:02}"}


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
