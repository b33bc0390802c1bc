"""Reward functions: their input, the built-in ones, and their registry.

The keyword arguments come from the configuration, which is checked against their annotations. The
argument `field` names a column of the prompts' rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Annotated, Final

from pydantic import Field

from megarl import plugins
from megarl.config.schema import RewardFunction
from megarl.config.schema.questions import Pattern, PatternWithGroup
from megarl.plugins import Function
from megarl.rewards.completion import Completion
from megarl.rewards.judge import judge

_NUMBER = re.compile(r"(?<![0-9])-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")

_LATEX = re.compile(r"\\boxed|\\\(|\\\[|\$")
"""What begins a formula in a text."""


def exact_match(completion: Completion, *, field: str = "answer", ignore_case: bool = False) -> float:
    """1 if the response is the field's text, ignoring space around them; else 0."""
    wanted = _folded(completion.field(field), ignore_case)
    return float(_folded(completion.response, ignore_case) == wanted)


def contains(completion: Completion, *, field: str = "answer", ignore_case: bool = False) -> float:
    """1 if the field's text occurs in the response; else 0."""
    wanted = _folded(completion.field(field), ignore_case)
    return float(wanted in _folded(completion.response, ignore_case))


def regex(completion: Completion, *, pattern: Pattern, whole: bool = False) -> float:
    """1 if the pattern matches a part of the response, or with `whole` all of it; else 0. A dot matches newlines."""
    search = re.fullmatch if whole else re.search
    return float(search(pattern, completion.response, re.DOTALL) is not None)


def extracted_match(completion: Completion, *, pattern: PatternWithGroup, field: str = "answer") -> float:
    """1 if the group of the pattern's last match in the response is the field's text; else 0."""
    found = re.findall(pattern, completion.response, re.DOTALL)
    return float(bool(found) and found[-1].strip() == str(completion.field(field)).strip())


def last_number(
    completion: Completion, *, field: str = "answer", tolerance: Annotated[float, Field(ge=0)] = 0.0
) -> float:
    """1 if the last number of the response equals that of the field, within the tolerance; else 0.

    The usual score of word problems such as GSM8K's. `1,234.50` and `1234.5` are the same number.
    """
    wanted = _last_number(str(completion.field(field)))
    if wanted is None:
        raise ValueError(f"the field {field!r} has no number: {completion.field(field)!r}")
    given = _last_number(completion.response)
    return float(given is not None and abs(given - wanted) <= Decimal(str(tolerance)))


def math_verify(completion: Completion, *, field: str = "answer") -> float:
    """1 if the response's answer, in LaTeX or as plain numbers, is mathematically equal to the field's; else 0.

    A field without LaTeX delimiters is one LaTeX expression. Source: Math-Verify (Hugging Face).
    """
    from math_verify import parse, verify

    text = str(completion.field(field))
    latex = text
    if not _LATEX.search(text):
        latex = f"\\boxed{{{text}}}"
    wanted = parse(latex)
    if not wanted:
        raise ValueError(f"the field {field!r} has no mathematical expression: {text!r}")
    return float(verify(wanted, parse(completion.response)))


def soft_overlong(
    completion: Completion,
    *,
    max_tokens: Annotated[int, Field(ge=1)],
    buffer_tokens: Annotated[int, Field(ge=1)],
    penalty: Annotated[float, Field(gt=0)] = 1.0,
    capped: bool = True,
) -> float:
    """min(0, -penalty * e / buffer_tokens), e = response tokens - (max_tokens - buffer_tokens), at most buffer_tokens.

    The soft overlong punishment: 0, then a line down to -penalty at ``max_tokens`` tokens, the end
    token included. If not ``capped``, longer responses lose more. Source: DAPO (Yu et al., 2025)
    and OpenRLHF (capped), verl and AReaL (not capped).
    """
    excess = completion.response_tokens - (max_tokens - buffer_tokens)
    if capped:
        excess = min(excess, buffer_tokens)
    return min(0.0, -penalty * excess / buffer_tokens)


def _folded(value: object, ignore_case: bool) -> str:
    text = str(value).strip()
    return text.casefold() if ignore_case else text


def _last_number(text: str) -> Decimal | None:
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


RULES: Final[Mapping[str, Function]] = {
    "contains": contains,
    "exact_match": exact_match,
    "extracted_match": extracted_match,
    "judge": judge,
    "last_number": last_number,
    "math_verify": math_verify,
    "regex": regex,
    "soft_overlong": soft_overlong,
}
"""The built-in functions by name."""

TOKEN_RULES: Final = frozenset({"soft_overlong"})
"""The built-in functions that read token ids; the others need a tokenizer."""


def resolve(name: str) -> Function:
    """Returns a built-in function, or imports package.module:function; raises ValueError with the broken rule."""
    if name in RULES:
        return RULES[name]
    if ":" not in name:
        raise ValueError(f"must be one of {', '.join(RULES)}, or package.module:function")
    return plugins.resolve(name, coroutines=True)


def labels(functions: Sequence[RewardFunction]) -> tuple[str, ...]:
    """Returns each function's name in metrics: without its module, numbered if several have the same name."""
    names = [function.name.rpartition(":")[2] for function in functions]
    found: list[str] = []
    for index, name in enumerate(names, start=1):
        number = names[:index].count(name)
        found.append(f"{name}_{number}" if names.count(name) > 1 else name)
    return tuple(found)
