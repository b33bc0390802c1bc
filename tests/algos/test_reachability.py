"""Every public function of megarl.algos is used, in the registry or elsewhere in the product."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "megarl"


def test_every_public_function_is_used() -> None:
    words: Counter[str] = Counter()
    public: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if file.parent.name == "algos":
            public |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        for node in ast.walk(tree):
            match node:
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
                    words[name] += 1
                case ast.Constant(value=str(text)) if file.name == "registry.py":
                    words.update(re.findall(r"\w+", text))
    words.update(f"{rule}_missing_end" for rule in ("replace", "subtract", "scale", "zero"))
    unused = {name for name in public if not name.startswith("_") and not words[name]}
    assert len(public) > 90
    assert not unused
