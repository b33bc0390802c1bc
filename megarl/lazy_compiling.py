"""Imports of libraries without torch's compiler and other optional parts."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast


@contextmanager
def compiled_at_first_call() -> Iterator[None]:
    """Defers the compilation of functions that torch.compile wraps in the block to their first call.

    torch.compile imports the compiler, which takes longer than all of megatron-core. Megatron-core
    (0.19.2) and vLLM (0.32) wrap functions at import that few runs call. With
    TORCH_COMPILE_DISABLE=1, where torch compiles nothing, the compiler is not imported at all.
    """
    import torch

    at_once = torch.compile
    torch.compile = functools.partial(_deferred, at_once)
    try:
        yield
    finally:
        torch.compile = at_once


@contextmanager
def absent(module: str) -> Iterator[None]:
    """Has imports of a module fail in the block, unless it has been imported."""
    hidden = module not in sys.modules
    if hidden:
        sys.modules[module] = cast(Any, None)
    try:
        yield
    finally:
        if hidden:
            del sys.modules[module]


@contextmanager
def distributions_by_records() -> Iterator[None]:
    """Has the distributions of packages be found without a look at each of their files.

    transformers (5.19) asks for them when it is imported. The standard library then looks for every
    installed file, which takes more than half of the import.
    """
    slowly = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = _packages_distributions
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = slowly


def _packages_distributions() -> dict[str, list[str]]:
    """Returns the names of the distributions of each top-level package, from ``top_level.txt`` or ``RECORD``."""
    found: dict[str, list[str]] = defaultdict(list)
    for distribution in importlib.metadata.distributions():
        packages = set((distribution.read_text("top_level.txt") or "").split())
        if not packages:
            for line in (distribution.read_text("RECORD") or "").splitlines():
                packages.add(line.partition(",")[0].partition("/")[0].removesuffix(".py"))
        for package in packages:
            found[package].append(distribution.metadata["Name"])
    return dict(found)


def _deferred(compile_: Callable[..., Any], function: Callable[..., Any] | None = None, **options: Any) -> Any:
    if function is None:
        return functools.partial(_deferred, compile_, **options)

    @functools.cache
    def compiled() -> Callable[..., Any]:
        if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
            return function
        return compile_(function, **options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call
