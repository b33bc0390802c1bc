"""Options of algorithms, read from the source of their functions, so that it works without torch.

An option is a keyword-only parameter. Its annotation may use the names of ``typing``, of ``megarl.bounds`` and of the
module itself, such as ``Level = Literal["batch", "group"]``. Its meaning is its entry in the ``Args`` of the function's
docstring, or else of the module's.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from megarl import bounds

REQUIRED: Final = ...
"""The default of an option that has none."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A keyword argument that a configuration gives."""

    type: Any
    default: Any
    meaning: str


@dataclass(frozen=True, kw_only=True)
class Signature:
    """A function's positional arguments, its options by name, and the first paragraph of its docstring."""

    arguments: tuple[str, ...]
    options: Mapping[str, Option]
    summary: str


@functools.cache
def signature_of(module: str, function: str, given: tuple[str, ...] = ()) -> Signature:
    """Returns the signature of a function of ``megarl/algos/MODULE.py``.

    Args:
        given: keyword-only parameters that are not options.

    Raises:
        KeyError: the module has no such function, or an option has no meaning.
        NameError: an annotation or a default uses a name that is unknown without torch.
    """
    source = _source(module)
    definition = source.functions[function]
    docstring = ast.get_docstring(definition) or ""
    meanings = {**_entries(source.docstring), **_entries(docstring)}
    options = {
        parameter.arg: Option(
            type=source.value(parameter.annotation),
            default=REQUIRED if default is None else source.value(default),
            meaning=_sentence(meanings[parameter.arg][0].upper() + meanings[parameter.arg][1:]),
        )
        for parameter, default in zip(definition.args.kwonlyargs, definition.args.kw_defaults, strict=True)
        if parameter.arg not in given
    }
    return Signature(
        arguments=tuple(parameter.arg for parameter in definition.args.args),
        options=options,
        summary=_sentence(" ".join(docstring.partition("\n\n")[0].split())),
    )


class _Source(dict[str, Any]):
    """The names that an annotation may use; those that the module assigns are evaluated on access."""

    def __init__(self, module: str) -> None:
        super().__init__(vars(typing) | vars(bounds))
        tree = ast.parse(Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8"))
        self.docstring = ast.get_docstring(tree) or ""
        self.functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        self._assigned = {
            ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)
        }

    def __missing__(self, name: str) -> Any:
        return self.value(self._assigned[name])

    def value(self, node: ast.expr | None) -> Any:
        assert node is not None, "every option is annotated"
        return eval(compile(ast.Expression(node), "<signature>", "eval"), {}, self)


_source = functools.cache(_Source)


def _entries(docstring: str) -> dict[str, str]:
    """The meaning of each parameter in a docstring."""
    text = inspect.cleandoc(docstring)
    found = re.findall(r"^    (\w+(?:, \w+)*): (.+(?:\n {8,}.+)*)", text, flags=re.MULTILINE)
    return {name: " ".join(meaning.split()) for names, meaning in found for name in names.split(", ")}


def _sentence(text: str) -> str:
    """A text for the pages, with null for None."""
    return re.sub(r"\bNone\b", "null", text).replace("``", "`")
