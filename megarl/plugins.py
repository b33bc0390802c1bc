"""Functions and classes of the user, named `package.module:name`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

Function = Callable[..., Any]


def resolve(name: str, *, coroutines: bool = False) -> Function:
    """Imports and returns a function, also from the working directory; raises ValueError with the broken rule.

    Args:
        coroutines: whether the function may be ``async``.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ValueError(f"{name} must be written as package.module:function")
    function = getattr(_import_module(module_name), attribute, None)
    if function is None:
        raise ValueError(f"the module {module_name} has no {attribute!r}; it must be a function of the module")
    refused = inspect.isclass(function) or (inspect.iscoroutinefunction(function) and not coroutines)
    if not callable(function) or refused:
        wanted = "a function" if coroutines else "a plain function"
        raise ValueError(f"{name} must be {wanted}, not {_kind(function)}")
    return function


def resolve_class[T](name: str, base: type[T]) -> type[T]:
    """Imports and returns a class, also from the working directory; raises ValueError with the broken rule."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ValueError(f"{name} must be written as package.module:Class")
    found = getattr(_import_module(module_name), attribute, None)
    if not inspect.isclass(found) or not issubclass(found, base):
        raise ValueError(f"{name} must be a class that is derived from {base.__module__}.{base.__name__}")
    return found


def suggestion(name: str) -> str | None:
    """Returns how a path, or a name without a colon, is written; None for other names."""
    path, colon, attribute = name.rpartition(":") if ":" in name else name.rpartition(".")
    module_name = path.removesuffix(".py").strip("./").replace("/", ".")
    if not module_name or not attribute:
        return None
    if colon != ":" or module_name != path:
        return f"write {module_name}:{'NAME' if attribute == 'py' else attribute}"
    return None


def check_options(
    function: Function, options: Mapping[str, Any], *, name: str, positional: int, given: tuple[str, ...] = ()
) -> None:
    """Checks the arguments of a call against a function's signature; raises ValueError with the signature.

    Args:
        options: keyword arguments of the configuration.
        name: name of the function in the message.
        positional: number of positional arguments of every call.
        given: other keyword arguments of every call.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have none
        return
    clash = [key for key in given if key in options]
    try:
        if clash:
            raise TypeError(f"{', '.join(clash)} is given by every call")
        signature.bind(*[None] * positional, **dict.fromkeys(given), **options)
    except TypeError as error:
        parameters: list[str] = []
        for parameter in list(signature.parameters.values())[positional:]:
            parameters.append(str(parameter.replace(annotation=inspect.Parameter.empty)))
        raise ValueError(f"arguments of {name}({', '.join(parameters)}): {error}") from error


def _import_module(name: str) -> Any:
    """Imports a module, also from the working directory, which an installed command does not search."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(f"the module {name} cannot be imported here ({error})") from error
    except (Exception, SystemExit) as error:  # the user's own code
        text = "".join(traceback.format_exception(error))
        raise ValueError(f"the module {name} cannot be imported:\n{text}") from error


def _kind(value: object) -> str:
    if inspect.isclass(value):
        return "a class"
    if inspect.iscoroutinefunction(value):
        return "a coroutine"
    return f"a value of the type {type(value).__name__}"
