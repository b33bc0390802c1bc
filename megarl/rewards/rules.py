"""The built-in reward functions: an answer in, a number out.

Arguments after the answer come from the configuration; their annotations say what is accepted. Those named ``field``
name a column of the prompts' rows.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated

from pydantic import AfterValidator, Field

from megarl.algos.overlong import overlong_penalty
from megarl.rewards.answer import Answer

_NUMBER = re.compile(r"(?<![0-9])-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"a regular expression: {error}") from None
    return pattern


def _compiles_with_group(pattern: str) -> str:
    if re.compile(_compiles(pattern)).groups != 1:
        raise ValueError("a regular expression with one group, in round brackets")
    return pattern


Pattern = Annotated[str, AfterValidator(_compiles)]
PatternWithGroup = Annotated[str, AfterValidator(_compiles_with_group)]


def exact_match(answer: Answer, *, field: str = "answer", ignore_case: bool = False) -> float:
    """1 where the response is the field's text, but for space around them; else 0."""
    return float(_folded(answer.response, ignore_case) == _folded(answer.field(field), ignore_case))


def contains(answer: Answer, *, field: str = "answer", ignore_case: bool = False) -> float:
    """1 where the field's text occurs in the response; else 0."""
    return float(_folded(answer.field(field), ignore_case) in _folded(answer.response, ignore_case))


def regex(answer: Answer, *, pattern: Pattern, whole: bool = False) -> float:
    """1 where the pattern matches somewhere in the response, or all of it; else 0. A dot matches new lines too."""
    search = re.fullmatch if whole else re.search
    return float(search(pattern, answer.response, re.DOTALL) is not None)


def extracted_match(answer: Answer, *, pattern: PatternWithGroup, field: str = "answer") -> float:
    """1 where the group of the pattern's last match in the response is the field's text; else 0."""
    found = re.findall(pattern, answer.response, re.DOTALL)
    return float(bool(found) and found[-1].strip() == str(answer.field(field)).strip())


def last_number(answer: Answer, *, field: str = "answer", tolerance: Annotated[float, Field(ge=0)] = 0.0) -> float:
    """1 where the last number of the response is that of the field, within the tolerance; else 0.

    So are word problems such as GSM8K's scored. ``1,234.50`` and ``1234.5`` are the same number.

    Raises:
        ValueError: the field has no number.
    """
    wanted = _last_number(str(answer.field(field)))
    if wanted is None:
        raise ValueError(f"the field {field!r} has no number: {answer.field(field)!r}")
    given = _last_number(answer.response)
    return float(given is not None and abs(given - wanted) <= Decimal(str(tolerance)))


def soft_overlong(
    answer: Answer,
    *,
    max_tokens: Annotated[int, Field(ge=1)],
    buffer_tokens: Annotated[int, Field(ge=1)],
    penalty: Annotated[float, Field(gt=0)] = 1.0,
    capped: bool = True,
) -> float:
    """0 up to ``max_tokens - buffer_tokens`` tokens, then a line down to -penalty at ``max_tokens``.

    Source: the soft overlong punishment of DAPO (Yu et al. 2025); see algos.overlong.

    Args:
        answer: its response tokens count, the end token too.
        max_tokens: where the penalty is full; the longest response that the rollout allows, as a rule.
        buffer_tokens: over which it rises.
        penalty: the full penalty.
        capped: whether it stays full for longer responses; else it goes on falling.
    """
    return overlong_penalty(
        len(answer.response_ids), max_tokens=max_tokens, buffer_tokens=buffer_tokens, factor=penalty, capped=capped
    )


def _folded(value: object, ignore_case: bool) -> str:
    text = str(value).strip()
    return text.casefold() if ignore_case else text


def _last_number(text: str) -> Decimal | None:
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None
