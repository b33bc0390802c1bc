"""Reward functions: what they see, the built-in ones, and their registry.

Arguments after the completion come from the configuration and are checked against their annotations. Those named
``field`` name a column of the prompts' rows.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field

from megarl import plugins
from megarl.algos.overlong import overlong_penalty
from megarl.config.schema import RewardFunction
from megarl.plugins import Function
from megarl.rewards import functions


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One response to one prompt.

    Args:
        prompt_id: of the prompt.
        prompt, response: as text, without special tokens; empty where the run has no tokenizer.
        prompt_ids, response_ids: as token ids, those of the end token included.
        finished: True where the model ended the response itself, False where the length limit did.
        fields: the other columns of the prompt's row, a reference answer for example.
    """

    prompt_id: str
    prompt: str
    response: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    finished: bool
    fields: Mapping[str, Any]

    def field(self, name: str) -> Any:
        """A column of the prompt's row.

        Raises:
            ValueError: the row has no such column; the message lists those that it has.
        """
        if name not in self.fields:
            known = ", ".join(self.fields) or "none"
            raise ValueError(f"the prompt has no field {name!r}; it has: {known}")
        return self.fields[name]


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


def exact_match(completion: Completion, *, field: str = "answer", ignore_case: bool = False) -> float:
    """1 where the response is the field's text, but for space around them; else 0."""
    return float(_folded(completion.response, ignore_case) == _folded(completion.field(field), ignore_case))


def contains(completion: Completion, *, field: str = "answer", ignore_case: bool = False) -> float:
    """1 where the field's text occurs in the response; else 0."""
    return float(_folded(completion.field(field), ignore_case) in _folded(completion.response, ignore_case))


def regex(completion: Completion, *, pattern: Pattern, whole: bool = False) -> float:
    """1 where the pattern matches somewhere in the response, or all of it; else 0. A dot matches new lines too."""
    search = re.fullmatch if whole else re.search
    return float(search(pattern, completion.response, re.DOTALL) is not None)


def extracted_match(completion: Completion, *, pattern: PatternWithGroup, field: str = "answer") -> float:
    """1 where the group of the pattern's last match in the response is the field's text; else 0."""
    found = re.findall(pattern, completion.response, re.DOTALL)
    return float(bool(found) and found[-1].strip() == str(completion.field(field)).strip())


def last_number(
    completion: Completion, *, field: str = "answer", tolerance: Annotated[float, Field(ge=0)] = 0.0
) -> float:
    """1 where the last number of the response is that of the field, within the tolerance; else 0.

    So are word problems such as GSM8K's scored. ``1,234.50`` and ``1234.5`` are the same number.

    Raises:
        ValueError: the field has no number.
    """
    wanted = _last_number(str(completion.field(field)))
    if wanted is None:
        raise ValueError(f"the field {field!r} has no number: {completion.field(field)!r}")
    given = _last_number(completion.response)
    return float(given is not None and abs(given - wanted) <= Decimal(str(tolerance)))


def soft_overlong(
    completion: Completion,
    *,
    max_tokens: Annotated[int, Field(ge=1)],
    buffer_tokens: Annotated[int, Field(ge=1)],
    penalty: Annotated[float, Field(gt=0)] = 1.0,
    capped: bool = True,
) -> float:
    """0 up to ``max_tokens - buffer_tokens`` tokens, then a line down to -penalty at ``max_tokens``.

    Source: the soft overlong punishment of DAPO (Yu et al. 2025); see algos.overlong.

    Args:
        completion: its response tokens count, the end token too.
        max_tokens: where the penalty is full; the longest response that the rollout allows, as a rule.
        buffer_tokens: over which it rises.
        penalty: the full penalty.
        capped: whether it stays full for longer responses; else it goes on falling.
    """
    return overlong_penalty(
        len(completion.response_ids), max_tokens=max_tokens, buffer_tokens=buffer_tokens, factor=penalty, capped=capped
    )


def _folded(value: object, ignore_case: bool) -> str:
    text = str(value).strip()
    return text.casefold() if ignore_case else text


def _last_number(text: str) -> Decimal | None:
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


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
    "contains": Rule(function=functions.contains, reads_text=True),
    "exact_match": Rule(function=functions.exact_match, reads_text=True),
    "extracted_match": Rule(function=functions.extracted_match, reads_text=True),
    "last_number": Rule(function=functions.last_number, reads_text=True),
    "regex": Rule(function=functions.regex, reads_text=True),
    "soft_overlong": Rule(function=functions.soft_overlong, reads_text=False),
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


def bind(function: RewardFunction) -> Callable[[Completion], float]:
    """The function with its arguments bound.

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
