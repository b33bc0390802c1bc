"""The page of the keys of other systems, from their table; this module as a script prints it."""

from __future__ import annotations

from pathlib import Path

from megarl.config.foreign_keys import SYSTEMS, ForeignKey, foreign_keys

INTRODUCTION = Path(__file__).with_name("foreign_keys.md")


def markdown() -> str:
    """Returns the whole page."""
    tables = [f"## {title}\n\n{_table(rows)}" for title, rows in foreign_keys().items()]
    return "\n".join([INTRODUCTION.read_text(encoding="utf-8"), *tables])


def _table(rows: tuple[ForeignKey, ...]) -> str:
    heading = ["here", "there", "remark"]
    lines = [heading, ["---"] * len(heading), *map(_cells, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cells(row: ForeignKey) -> list[str]:
    remark = row.remark
    if not remark and not row.ours:
        remark = "not there yet"
    there: list[str] = []
    for system, name in SYSTEMS.items():
        if system in row.keys:
            there.append(f"{name}: {_code(row.keys[system])}")
    return [_code(row.ours), "<br>".join(there), remark]


def _code(keys: tuple[str, ...]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


if __name__ == "__main__":
    print(markdown(), end="")
