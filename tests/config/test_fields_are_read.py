"""Every field is read by a module that uses the configuration, outside of its rules.

The check is by name: it does not know the types of the objects. Options of functions are passed on as a
whole; ``test_choices`` holds them to the functions.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import get_args

from pydantic import BaseModel

from megarl.config.schema import Choice, Fault, stage_classes
from megarl.config.schema.schema_walk import choices, sections
from tests.config.debug import REPOSITORY

PACKAGE = REPOSITORY / "megarl"


def reads(tree: ast.Module) -> Iterator[ast.Attribute]:
    """The attributes that a source reads."""
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load))


def knows_the_configuration(tree: ast.Module) -> bool:
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return any(f"{module}.".startswith(("megarl.config.", "megarl.stages.")) for module in modules)


def read() -> set[str]:
    """The names that are read where the configuration is known, and those that a section's own properties read."""
    found: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        tree, part = ast.parse(file.read_text(encoding="utf-8")), file.relative_to(PACKAGE).parts
        if part[:2] == ("config", "schema"):
            found |= {node.attr for node in reads(tree) if ast.unparse(node.value).partition(".")[0] == "self"}
        elif part[0] != "config" and knows_the_configuration(tree):
            found |= {node.attr for node in reads(tree)}
    return found


def test_every_field_is_read() -> None:
    seen, unread = read() | set(get_args(Fault)), set[str]()  # RowSettings.drop reads the faults by their names
    for schema in stage_classes().values():
        found: list[type[BaseModel]] = [schema]
        found += [one for _, below in sections(schema) for one in choices(below).values() or (below,)]
        for owner in found:
            if not issubclass(owner, Choice):
                unread |= {f"{owner.__name__}.{name}" for name in owner.model_fields if name not in seen}
    assert unread == set()
