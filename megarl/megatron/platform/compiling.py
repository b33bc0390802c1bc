"""torch.compile when a function is called, in place of when it is defined."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def compiled_at_first_call() -> Iterator[None]:
    """Lets torch.compile return at once, for functions that are defined meanwhile, and compile at their first call.

    It imports the compiler to wrap a function, which takes longer than all of megatron-core, and megatron-core wraps
    functions at import that few runs call (``megatron/core/jit.py``, 0.16.1).
    """
    at_once = torch.compile
    torch.compile = functools.partial(_deferred, at_once)
    try:
        yield
    finally:
        torch.compile = at_once


def _deferred(compile_: Callable[..., Any], function: Callable[..., Any] | None = None, **options: Any) -> Any:
    if function is None:
        return functools.partial(_deferred, compile_, **options)

    @functools.cache
    def compiled() -> Callable[..., Any]:
        return compile_(function, **options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call
