"""Every public function of megarl.algos is reachable from a configuration.

Read from the source. A name is reached where a module outside of megarl.algos refers to it, the tables of the registry
included, or where the definition of a name that is reached refers to it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path

from megarl.algos.registry import KINDS

PACKAGE = Path(__file__).parents[2] / "megarl"
ALGOS = PACKAGE / "algos"
Name = tuple[str, str]
"""A module of megarl.algos, and a name in it."""


def parsed(directory: Path) -> dict[Path, ast.Module]:
    return {file: ast.parse(file.read_text(encoding="utf-8")) for file in directory.rglob("*.py")}


def definitions(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """The top-level names of a module, with their definitions."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((target.id, node) for target in targets if isinstance(target, ast.Name))


def imported(tree: ast.Module) -> dict[str, str | Name]:
    """By local name: the modules of megarl.algos, and the names from them, that a module imports anywhere."""
    found: dict[str, str | Name] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "megarl.algos":
            found |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megarl.algos."):
            module = (node.module or "").rpartition(".")[2]
            found |= {alias.asname or alias.name: (module, alias.name) for alias in node.names}
    return found


def references(node: ast.AST, names: dict[str, str | Name]) -> Iterator[Name]:
    """The names of megarl.algos in a piece of source."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and isinstance(target := names.get(part.id), tuple):
            yield target
        elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
            module = names.get(part.value.id)
            if isinstance(module, str):
                yield module, part.attr


def reached(
    outside: dict[Path, ast.Module], algos: dict[Path, ast.Module], registered: AbstractSet[Name] = frozenset()
) -> set[Name]:
    uses: dict[Name, set[Name]] = {}
    for file, tree in algos.items():
        own = dict(definitions(tree))
        names = imported(tree) | {name: (file.stem, name) for name in own}
        for name, node in own.items():
            uses[file.stem, name] = set(references(node, names))
    todo = {name for tree in outside.values() for name in references(tree, imported(tree))} | registered
    done: set[Name] = set()
    while todo:
        name = todo.pop()
        done.add(name)
        todo |= uses.get(name, set()) - done
    return done


def public(algos: dict[Path, ast.Module]) -> set[Name]:
    return {
        (file.stem, name)
        for file, tree in algos.items()
        for name, node in definitions(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not name.startswith("_")
    }


def test_every_public_function_is_used() -> None:
    algos = parsed(ALGOS)
    outside = {file: tree for file, tree in parsed(PACKAGE).items() if ALGOS not in file.parents}
    registered = {(kind.module, function) for kind in KINDS for function in kind.functions.values()}
    there, used = public(algos), reached(outside, algos, registered)
    assert {("policy_loss", "gspo"), ("aggregation", "weighted_sum"), ("rollout_correction", "m2po")} <= there & used, (
        "nothing is found"
    )
    assert there <= used, there - used


def test_an_unused_function_is_found() -> None:
    algos = {Path("one.py"): ast.parse("def used(): return helper()\ndef helper(): ...\ndef unused(): return used()")}
    outside = {Path("two.py"): ast.parse("from megarl.algos.one import used as it\nit()")}
    assert public(algos) - reached(outside, algos) == {("one", "unused")}
    by_module = {Path("two.py"): ast.parse("from megarl.algos import one\nTABLE = {'name': one.unused}")}
    assert not public(algos) - reached(by_module, algos)
