"""Size and density of the package: python tools/density.py; `make lint` fails where a limit is exceeded.

Counts are per 1,000 lines, but for `long`, lines over 100 columns in per cent, and `nodes`, AST
nodes per line. Who lowers a number lowers its limit; a feature may raise that of `lines`, and its
commit says by how many and why.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

ROOTS = ("megarl", "launchers", "tools")
LIMITS = {
    "lines": 55531,
    "parallel assignments": 0.0,
    "conditional expressions": 8.1,
    "comprehensions": 18.0,
    "classes": 10.7,
    "long": 4.0,
    "nodes": 6.7,
}


def count(source: str, found: Counter[str]) -> None:
    """Adds the counts of a file."""
    lines = source.splitlines()
    found["lines"] += len(lines)
    found["long"] += sum(len(line) > 100 for line in lines)
    for node in ast.walk(ast.parse(source)):
        found["nodes"] += 1
        if isinstance(node, ast.Assign):
            both = isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple)
            found["parallel assignments"] += both
        elif isinstance(node, ast.IfExp):
            found["conditional expressions"] += 1
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            found["comprehensions"] += 1
        elif isinstance(node, ast.ClassDef):
            found["classes"] += 1


def measure(repository: Path) -> dict[str, float]:
    """Returns the numbers that have limits."""
    found: Counter[str] = Counter()
    for root in ROOTS:
        for path in sorted((repository / root).rglob("*.py")):
            count(path.read_text(encoding="utf-8"), found)
    lines = found["lines"]
    per_line = {name: round(1000 * found[name] / lines, 1) for name in LIMITS}
    return {
        **per_line,
        "lines": lines,
        "long": round(100 * found["long"] / lines, 1),
        "nodes": round(found["nodes"] / lines, 2),
    }


def main() -> int:
    found = measure(Path(__file__).parents[1])
    exceeded = 0
    for name, limit in LIMITS.items():
        above = found[name] > limit
        exceeded += above
        print(f"{name:32} {found[name]:9g}   limit {limit:9g}{'   exceeded' if above else ''}")
    if found["lines"] > LIMITS["lines"]:
        print("A feature may raise the limit of lines in tools/density.py; its commit says by how many, and why.")
    return int(exceeded > 0)


if __name__ == "__main__":
    sys.exit(main())
