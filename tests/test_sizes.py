"""Files and functions stay short, and a name says which file or class is meant."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
SOURCES = [file for room in ("megarl", "launchers", "tools") for file in sorted((REPOSITORY / room).rglob("*.py"))]
TREES = {file.relative_to(REPOSITORY): ast.parse(file.read_text(encoding="utf-8")) for file in SOURCES}

COMMAND_LINES = {"cli.py", "__main__.py"}
"""Whose functions are as long as their options."""
STAGE_FILES = {"config.py", "trainer.py"}
"""Every stage has both."""


def functions() -> Iterator[tuple[str, int]]:
    """Every function but those of command lines, with its lines."""
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and file.name not in COMMAND_LINES:
                assert node.end_lineno is not None
                yield f"{file}:{node.name}", node.end_lineno - node.lineno + 1


def test_files_are_short() -> None:
    lines = {str(file): len((REPOSITORY / file).read_text(encoding="utf-8").splitlines()) for file in TREES}
    assert not {file: count for file, count in lines.items() if count > 500}


def test_functions_are_short() -> None:
    lengths = [(length, name) for name, length in functions()]
    assert not [(length, name) for length, name in lengths if length > 70]
    assert sorted(lengths)[int(0.95 * len(lengths))][0] <= 30


def test_names_of_files_and_classes_are_unique() -> None:
    package = [file.name for file in TREES if file.parts[0] == "megarl"]
    files = Counter(name for name in package if name not in {"__init__.py", *COMMAND_LINES, *STAGE_FILES})
    assert not [name for name, count in files.items() if count > 1]
    classes = Counter(node.name for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert not [name for name, count in classes.items() if count > 1]


def test_statements_do_one_thing() -> None:
    """A tuple on both sides of an assignment hides assignments; a condition in a condition needs a second look."""
    pairs: list[str] = []
    nested: list[str] = []
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
                if isinstance(node.value, ast.Tuple) and len(node.value.elts) > 2:
                    pairs.append(f"{file}:{node.lineno}")
            elif isinstance(node, ast.IfExp):
                if any(isinstance(part, ast.IfExp) for part in (node.test, node.body, node.orelse)):
                    nested.append(f"{file}:{node.lineno}")
    assert pairs == nested == []
