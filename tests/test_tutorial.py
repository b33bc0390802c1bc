"""The tutorial shows the files that it is about, and they make a run."""

from __future__ import annotations

import re
from pathlib import Path

from examples.tutorial.prepare import prepare
from megarl.config import load
from megarl.preflight.check import check
from tests.config.debug import REPOSITORY

FILES = REPOSITORY / "examples" / "tutorial"
PAGE = (REPOSITORY / "docs" / "tutorial.md").read_text(encoding="utf-8")
LISTINGS = dict(re.findall(r"^<!-- (\S+) -->\n```\w+\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL))


def test_the_listings_equal_the_files() -> None:
    assert LISTINGS.keys() == {"letters_reward.py", "letters.yaml", "short.yaml"}
    for name, text in LISTINGS.items():
        assert text == (FILES / name).read_text(encoding="utf-8"), name


def test_the_runs_pass_the_checks(user_directory: Path) -> None:
    prepare(user_directory)
    for name, text in LISTINGS.items():
        (user_directory / name).write_text(text, encoding="utf-8")
    for name in ("letters.yaml", "short.yaml"):
        assert load(name, (), check).run.steps == 60
    rows = [(user_directory / f"{name}.jsonl").read_text().splitlines() for name in ("prompts", "held_out")]
    assert [len(set(lines)) for lines in rows] == [320, 80]
    assert not set(rows[0]) & set(rows[1])
    assert rows[0][0] in PAGE
