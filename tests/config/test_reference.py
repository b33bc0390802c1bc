"""The page of all fields agrees with the schema."""

from __future__ import annotations

import re

from tests.config.debug import REPOSITORY
from tools.docs.configuration_page import markdown


def test_the_page_is_up_to_date() -> None:
    assert (REPOSITORY / "docs" / "configuration.md").read_text(encoding="utf-8") == markdown(), "run make docs"


def test_the_table_of_contents_links_to_the_headings() -> None:
    contents = markdown().partition("## Contents\n")[2].partition("\n## ")[0]
    links = dict.fromkeys(re.findall(r"\]\(#([\w-]+)\)", contents))
    headings = re.findall(r"^## (.*)$", markdown(), flags=re.MULTILINE)
    anchors = ["".join(c for c in text.lower().replace(" ", "-") if c.isalnum() or c in "-_") for text in headings]
    assert sorted(links) == sorted(set(anchors) - {"contents"})
    (eval_row,) = re.findall(r"^\| \[`eval`\]\(#stage-eval\) \| (.*) \|$", contents, flags=re.MULTILINE)
    assert "[`run`](#run-eval)" in eval_row
    assert "](#run-sft-dpo-reward_model-ppo)" not in eval_row


def test_every_table_row_is_one_line() -> None:
    rows = [line for line in markdown().splitlines() if line.startswith("|")]
    assert len(rows) > 100
    assert [row for row in rows if not row.endswith(" |")] == []
    assert "Ranks of engines receive into two, and trainers send from two where they cannot write there." in markdown()
