"""The page of all fields is that of the schema."""

from __future__ import annotations

from megarl.config.reference import markdown
from tests.config.debug import REPOSITORY


def test_the_page_is_up_to_date() -> None:
    assert (REPOSITORY / "docs" / "configuration.md").read_text(encoding="utf-8") == markdown(), "run make docs"


def test_the_page_has_the_nested_fields() -> None:
    page = markdown()
    assert "## `groups.<name>.roles.<name>`" in page
    assert "| `in` | `reward` | `reward` |" in page
    assert "| `prompts_per_step` | int | required |" in page
