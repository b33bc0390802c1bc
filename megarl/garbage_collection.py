"""The garbage collector, out of the way of work that makes many objects that live on."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


@contextmanager
def collector_paused() -> Generator[None]:
    """Pauses the garbage collector, which would scan the many new objects repeatedly."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def importing() -> Generator[None]:
    """Pauses the garbage collector while modules are imported, and exempts from it what exists then.

    It takes a third of the import of Megatron-core, and a quarter of vLLM's.
    """
    with collector_paused():
        yield
        gc.freeze()  # before the collector is on again, which would scan all of it at once


@contextmanager
def collections_skipped() -> Generator[None]:
    """Has calls of `gc.collect` do nothing: each takes half a second of a process that has imported vLLM."""
    untyped: Any = gc
    collect = gc.collect
    untyped.collect = lambda generation=2: 0
    try:
        yield
    finally:
        untyped.collect = collect
