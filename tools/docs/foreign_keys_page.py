"""The page of the keys of other systems, from their table; this module as a script prints it."""

from __future__ import annotations

from megarl.config.foreign_keys import SYSTEMS, ForeignKey, foreign_keys

_INTRODUCTION = """\
# From TRL, verl and NeMo-RL

What the 60 most pasted keys of other systems are here. `megarl plan` and `megarl train` say the same of a key that
they do not know, with or without the section in which it stands there: `num_generations`, `rollout.n` and
`actor_rollout_ref.rollout.n` are all answered with `data.samples_per_prompt`.

The keys are those of TRL 1.16 (`GRPOConfig`, `RLOOConfig`, `SFTConfig`, `RewardConfig`, `ModelConfig` and
`ScriptArguments`, with transformers 5), verl 0.9.1 and NeMo-RL 0.6. In the last column, *there* is the other system
and *here* is MegaRL. Rows without a field here say why; *not there yet* is something that MegaRL does not have.

A number that differs from TRL's with everything else equal: the row of the padding token in the embedding is trained
here like any other, and never by transformers (`padding_idx`). It matters where that token also occurs in texts.

Reward functions need no change: `adapter: trl` or `adapter: verl` calls them as they are ([rewards](rewards.md)).
Columns of rows have the same names ([data](data.md)). [recipes](recipes.md) has configurations with these systems'
own settings. [configuration](configuration.md) describes every field. `make docs` writes this page from
`megarl/config/foreign_keys.yaml`.
"""


def markdown() -> str:
    """Returns the whole page."""
    tables = [f"## {title}\n\n{_table(rows)}" for title, rows in foreign_keys().items()]
    return "\n".join([_INTRODUCTION, *tables])


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
