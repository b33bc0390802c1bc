"""The built-in tools: a calculator, and Python programs under limits."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

from megarl.environments.python_program import run_program

_LONGEST_EXPRESSION = 1000
_LARGEST_BITS = 4096
"""Bits of an integer power."""
_MAX_DIGITS = 1000

_BINARY: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: lambda base, exponent: _power(base, exponent),
}
_UNARY: Final[Mapping[type[ast.unaryop], Callable[[Any], Any]]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_MATH: Final = ("ceil", "cos", "exp", "floor", "log", "sin", "sqrt", "tan")
_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    **{name: getattr(math, name) for name in _MATH},
    "abs": abs,
    "max": max,
    "min": min,
    "round": lambda number, *digits: _rounded(number, *digits),
}
_CONSTANTS: Final = {"e": math.e, "pi": math.pi}


def calculator(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: such as (2 + 3) * 4 / sqrt(2); also //, %, **, abs, ceil, cos, exp, floor, log,
            max, min, round, sin, tan, pi and e.
    """
    if len(expression) > _LONGEST_EXPRESSION:
        raise ValueError(f"an expression has at most {_LONGEST_EXPRESSION} characters")
    return str(_value(ast.parse(expression.strip(), mode="eval").body))


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*map(_value, args))
        case _:
            raise ValueError(f"not arithmetic: {ast.unparse(node)}")


def _power(base: Any, exponent: Any) -> Any:
    integers = isinstance(base, int) and isinstance(exponent, int)
    if integers and base.bit_length() * abs(exponent) > _LARGEST_BITS:
        raise ValueError("the power is too large")
    return base**exponent


def _rounded(number: Any, *digits: Any) -> Any:
    if any(abs(places) > _MAX_DIGITS for places in digits):
        raise ValueError(f"round takes at most {_MAX_DIGITS} digits")
    return round(number, *digits)


def python(code: str) -> str:
    """Runs a Python program in a new process, and returns what it prints.

    Args:
        code: the whole program; it must print its results. It has ten seconds, 1 GiB of memory and
            no network.
    """
    return run_program(code, "bubblewrap")


def python_without_sandbox(code: str) -> str:
    """Runs a Python program in a new process, and returns what it prints.

    Args:
        code: the whole program; it must print its results. It has ten seconds and 1 GiB of memory.
    """
    return run_program(code, "none")


TOOLS: Final[Mapping[str, Callable[..., Any]]] = {"calculator": calculator, "python": python}
"""The built-in tools by name."""
