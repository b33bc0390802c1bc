"""Rules between fields. A rule is a function of the sections that it reads, by name, and yields problems."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megarl.config.problems import Problem
from megarl.config.rules import algorithm, model, placement

Rule = Callable[..., Iterator[Problem]]

RULES: tuple[Rule, ...] = (*placement.RULES, *model.RULES, *algorithm.RULES)


def broken_rules(sections: Mapping[str, Any]) -> list[Problem]:
    """Every problem between fields, of the rules whose sections are all there.

    Args:
        sections: fields of RunConfig by name; a section that is not sound in itself is left out.
    """
    problems: list[Problem] = []
    for rule in RULES:
        reads = inspect.signature(rule).parameters
        if all(name in sections for name in reads):
            problems.extend(rule(**{name: sections[name] for name in reads}))
    return problems
