"""Rules between fields. A rule is a function of the sections that it reads, by name, and yields problems."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megarl.config.problems import Problem
from megarl.config.rules import algorithm, model, placement

Rule = Callable[..., Iterator[Problem]]

RULES: Mapping[str, tuple[Rule, ...]] = {
    "sft": (),
    "reward_model": (),
    "ppo": (*placement.RULES, *model.RULES, *algorithm.RULES),
}
"""By stage."""


def broken_rules(sections: Mapping[str, Any]) -> list[Problem]:
    """Every problem between fields, of the stage's rules whose sections are all there.

    Args:
        sections: fields of the stage's configuration by name; one that is not sound in itself is left out.
    """
    problems: list[Problem] = []
    for rule in RULES[sections["stage"]]:
        reads = inspect.signature(rule).parameters
        if all(name in sections for name in reads):
            problems.extend(rule(**{name: sections[name] for name in reads}))
    return problems
