"""Options of algorithms, read from the source of their functions, so that it works without torch.

An option is a keyword-only parameter. Its annotation may use ``Literal``, the names of
``megarl.bounds`` and those of the module itself, such as ``Level = Literal["batch", "group"]``. Its
meaning is its entry in the ``Args`` of the function's docstring, or else of the module's.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from megarl import bounds

_NAMES: Final = {"bool": bool, "int": int, "float": float, **vars(bounds)}
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
        TypeError: the module has no such function, or an option has no meaning, or a type that is
            not known here.
    """
    source = _source(module)
    if function not in source.functions:
        raise TypeError(f"megarl/algos/registry.py names {function}, which megarl/algos/{module}.py does not define")
    definition = source.functions[function]
    docstring = ast.get_docstring(definition) or ""
    meanings = {**_entries(source.docstring), **_entries(docstring)}
    options: dict[str, Option] = {}
    for parameter, default in zip(definition.args.kwonlyargs, definition.args.kw_defaults, strict=True):
        name = parameter.arg
        if name in given:
            continue
        if parameter.annotation is None or name not in meanings:
            missing = "an annotation" if parameter.annotation is None else "an entry in the Args of its docstring"
            raise TypeError(f"megarl/algos/{module}.py: the option {name} of {function} needs {missing}")
        meaning = meanings[name]
        options[name] = Option(
            type=source.value(parameter.annotation),
            default=REQUIRED if default is None else source.value(default),
            meaning=_sentence(meaning[0].upper() + meaning[1:]),
        )
    return Signature(
        arguments=tuple(parameter.arg for parameter in definition.args.args),
        options=options,
        summary=_sentence(" ".join(docstring.partition("\n\n")[0].split())),
    )


class _Source:
    """The functions of a module, and the values of its annotations and defaults."""

    def __init__(self, module: str) -> None:
        self._module = module
        tree = ast.parse(Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8"))
        self.docstring = ast.get_docstring(tree) or ""
        self.functions: dict[str, ast.FunctionDef] = {}
        self._assigned: dict[str, ast.expr] = {}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                self.functions[node.name] = node
            elif isinstance(node, ast.Assign):
                self._assigned[ast.unparse(node.targets[0])] = node.value

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name) if name in self._assigned:
                return self.value(self._assigned[name])
            case ast.Name(id=name) if name in _NAMES:
                return _NAMES[name]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.value(operand)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return self.value(left) | self.value(right)
            case ast.Tuple(elts=entries):
                return tuple(map(self.value, entries))
            case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
                return Literal[self.value(choices)]
            case _:
                place = f"megarl/algos/{self._module}.py, line {node.lineno}: {ast.unparse(node)}"
                known = "bool, int, float, Literal, and the names of megarl.bounds and of the module"
                raise TypeError(f"{place} is neither a type nor a default of an option; types are {known}")


_source = functools.cache(_Source)


def _entries(docstring: str) -> dict[str, str]:
    """The meaning of each parameter in a docstring."""
    text = inspect.cleandoc(docstring)
    found = re.findall(r"^    (\w+(?:, \w+)*): (.+(?:\n {8,}.+)*)", text, flags=re.MULTILINE)
    return {name: " ".join(meaning.split()) for names, meaning in found for name in names.split(", ")}


def _sentence(text: str) -> str:
    """A text for the pages, with null for None."""
    return re.sub(r"\bNone\b", "null", text).replace("``", "`")
