"""The page that lists every algorithm, made from the functions themselves; this module as a script prints it."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from megarl.algos.kinds import FIXED, KINDS, Kind
from megarl.algos.parts import PARTS, Part

_INTRODUCTION = """\
# Algorithms

What every choice of a [configuration](configuration.md) computes: its name, formula, options with their defaults, and
source. The functions are in `megarl/algos`, one noun a file: tensors in, tensors out. The combinations that other
systems use are [recipes](recipes.md).

Shapes: B rows (samples of a rank), R response tokens of the longest of them, N samples of a whole step, P preferences.
Logarithms are natural, log-probabilities are in nats, and masks are True where a token counts.

## Functions of your own

Each field of the following table also takes a function of yours as `package.module:function`, with its keyword
arguments as `args`. The module must be importable from the directory that `megarl` is run in. `megarl plan CONFIG`
imports it and holds the arguments against its signature, before anything starts.

{kinds}
- Options are keyword arguments; the arguments of the table come first, by position.
- Tensors of tokens are [B, R], float32, on the device of the role; off the mask they are anything, and what you return
  there counts for nothing. A rank may have no rows at all.
- `samples` is a `megarl.algos.comparisons.Samples` of the whole step, on the CPU: scores, groups, lengths and more.
- `reduce` sums a float64 vector over the ranks. It is the one way to a statistic of the whole step: call it equally
  often whatever rows there are. Everything else must be a function of the rows alone, or results depend on the layout.
- A loss returns `megarl.algos.terms.LossTerms`: the loss of each token, which carries the gradient, and what is told
  of it by name.
- An own `algo.advantage` compares samples, or with `level: token` makes advantages of the rewards of tokens; `values`
  is None without a critic.

For example, a policy loss with a price on leaving the old policy in place of a clip, in a file `my_losses.py`:

```python
import torch
from torch import Tensor

from megarl.algos.terms import LossTerms


def damped(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    damping: float = 0.1,
) -> LossTerms:
    \"\"\"-A * r + damping * (r - 1)^2, with r = exp(new - old).\"\"\"
    moved = torch.where(response_mask, new_logprobs - old_logprobs, 0.0)
    ratio = moved.clamp(-20.0, 20.0).exp()
    values = -advantages * ratio + damping * (ratio - 1).square()
    return LossTerms(values=values, metrics={"approxkl": moved.detach().square() / 2})
```

and what names it in the configuration:

```yaml
algo:
  policy_loss: {name: my_losses:damped, args: {damping: 0.5}}
```
"""
_ALSO = {
    "reinforce_pp": "As `reinforce`; `algo.normalise.advantages: auto` whitens over the step.\n\n"
    "Source: Hu et al., REINFORCE++ (2025); OpenRLHF and verl.",
    "reinforce_pp_baseline": "As `dr_grpo`; `algo.normalise.advantages: auto` whitens over the step.\n\n"
    "Source: REINFORCE++-baseline, OpenRLHF's `reinforce_baseline`.",
}
"""Names of a function that another name stands for already: what is different about them."""

_OF_THE_DATA = {"pairwise": ("`margin` = false",)}
"""Options that say what of the data a function is given."""


def markdown() -> str:
    """The whole page."""
    parts, told = [_INTRODUCTION.replace("{kinds}", _kinds())], set[str]()

    def begin(title: str, functions: Iterable[Callable[..., Any]]) -> None:
        """A heading, and what the modules of the functions say of all of them."""
        modules = [name for name in dict.fromkeys(function.__module__ for function in functions) if name not in told]
        told.update(modules)
        parts.append("\n\n".join([f"## {title}", *map(_of_module, modules)]) + "\n")

    for kind in KINDS:
        begin(f"{kind.title}: `{kind.field}`", kind.functions.values())
        parts += _functions(kind)
    for title in dict.fromkeys(part.title for part in PARTS):
        own = [part for part in PARTS if part.title == title]
        begin(title, [part.function for part in own])
        parts += [_part(part) for part in own]
    return "\n".join(parts)


def _kinds() -> str:
    """The table of what own functions are called with."""
    rows = ["| field | called with | returns |", "| --- | --- | --- |"]
    for kind in KINDS:
        if kind.own:
            level = f", `level: {kind.level}`" if kind.level is not None else ""
            arguments = [*kind.arguments, *(f"{name}=" for name in kind.keywords)]
            rows.append(f"| `{kind.field}`{level} | `{', '.join(arguments)}` | {kind.returns} |")
    return "\n".join(rows) + "\n"


def _functions(kind: Kind) -> Iterator[str]:
    for name, function in kind.functions.items():
        yield f"### `{name}`\n\n{_options(name, function, kind.keywords)}{_ALSO.get(name) or _text(function)}\n"


def _part(part: Part) -> str:
    choice = "" if part.choice is None else f": {part.choice}"
    return f"### `{part.field}{choice}`\n\n{_text(part.function)}\n"


def _options(name: str, function: Callable[..., Any], keywords: Sequence[str]) -> str:
    """A line of the keyword arguments that a configuration gives, with their defaults."""
    own = [
        f"`{option}`" + ("" if parameter.default is parameter.empty else f" = {_value(parameter.default)}")
        for option, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and option not in {*keywords, *FIXED}
    ]
    own += _OF_THE_DATA.get(name, ())
    return f"Options: {', '.join(own)}.\n\n" if own else ""


def _value(default: object) -> str:
    """As YAML has it."""
    if isinstance(default, float):
        return f"{default:g}"
    return "null" if default is None else str(default).lower()


def _text(function: Callable[..., Any]) -> str:
    """What a docstring says before its arguments; the source last, in a paragraph of its own."""
    text = re.split(r"^(?:Args|Returns|Raises):", inspect.getdoc(function) or "", maxsplit=1, flags=re.MULTILINE)[0]
    found = re.search(r"\s*Source:\s+(.*?)(?=\n\n|\Z)", text, flags=re.DOTALL)
    if found is None:
        return _in_markdown(text)
    return _in_markdown(f"{text[: found.start()]}\n{text[found.end() :]}\n\nSource: {found[1]}")


def _of_module(name: str) -> str:
    """What a module says of all its functions; arguments become a list."""
    text = inspect.getdoc(sys.modules[name]) or ""
    text = re.sub(r"^Args:\n", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"^Returns:\n +", "\nThey return ", text, flags=re.MULTILINE)
    return _in_markdown(re.sub(r"^    (\w+(?:, \w+)*): ", r"- `\1`: ", text, flags=re.MULTILINE))


def _in_markdown(text: str) -> str:
    """Paragraphs of full lines, with single backticks; lists and indented formulas stay as they are."""
    blocks = [block for block in re.split(r"\n\s*\n", text.replace("``", "`").strip("\n")) if block.strip()]
    return "\n\n".join(block if block.startswith(("    ", "- ")) else _filled(block) for block in blocks)


def _filled(block: str) -> str:
    return textwrap.fill(" ".join(block.split()), width=120, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    print(markdown(), end="")
