"""What the names of reward functions stand for, and their arguments."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from megarl import plugins
from megarl.config.schema import RewardFunction
from megarl.plugins import Function
from megarl.rewards import rules
from megarl.rewards.answer import Answer


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A built-in function.

    Args:
        function: itself.
        reads_text: whether it needs a tokenizer.
    """

    function: Function
    reads_text: bool


RULES: Final[Mapping[str, Rule]] = {
    "contains": Rule(function=rules.contains, reads_text=True),
    "exact_match": Rule(function=rules.exact_match, reads_text=True),
    "extracted_match": Rule(function=rules.extracted_match, reads_text=True),
    "last_number": Rule(function=rules.last_number, reads_text=True),
    "regex": Rule(function=rules.regex, reads_text=True),
    "soft_overlong": Rule(function=rules.soft_overlong, reads_text=False),
}
"""The built-in functions by name."""


def resolve(name: str) -> Function:
    """The function of that name: a built-in one, or ``package.module:function``, from the working directory too.

    Raises:
        ValueError: there is none, or it is not a function; the message says what must hold.
    """
    if name in RULES:
        return RULES[name].function
    if ":" not in name:
        raise ValueError(f"one of {', '.join(RULES)}, or package.module:function")
    return plugins.resolve(name)


def bind(function: RewardFunction) -> Callable[[Answer], float]:
    """The function with its arguments, ready for answers.

    Raises:
        ValueError: see ``resolve``.
    """
    return functools.partial(resolve(function.name), **function.args)


def labels(functions: Sequence[RewardFunction]) -> tuple[str, ...]:
    """What each function is called in metrics: its name without the module; those of one name are numbered."""
    names = [function.name.rpartition(":")[2] for function in functions]
    return tuple(_numbered(names))


def _numbered(names: Sequence[str]) -> Iterator[str]:
    total, seen = Counter(names), Counter[str]()
    for name in names:
        seen[name] += 1
        yield f"{name}_{seen[name]}" if total[name] > 1 else name
