"""Processes that hold an object each, and times that several of them took together."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any


@dataclass(kw_only=True)
class Span:
    """When something began and ended on this machine's clock, and what took how long in it.

    Args:
        seconds: by stage.
        value: whatever came of it.
    """

    start: float
    end: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    value: Any = None

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Adds the time of the block to a stage."""
        start = perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start


def measure(function: Callable[[], Any]) -> Span:
    """The span of a call."""
    span = Span(start=perf_counter())
    span.value = function()
    span.end = perf_counter()
    return span


def elapsed(spans: Sequence[Span]) -> float:
    """From the first beginning to the last end."""
    return max(span.end for span in spans) - min(span.start for span in spans)


class Process:
    """A process with one object, whose methods are called from here.

    Args:
        factory: makes the object there.
    """

    def __init__(self, factory: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, factory, args))
        self._process.start()
        theirs.close()

    def begin(self, method: str, *args: Any) -> None:
        """Begins a call; ``end`` waits for it."""
        self._pipe.send((method, args))

    def end(self) -> Any:
        """What the call that began returned."""
        ok, value = self._pipe.recv()
        if not ok:
            raise RuntimeError(value)
        return value

    def call(self, method: str, *args: Any) -> Any:
        self.begin(method, *args)
        return self.end()

    def close(self) -> None:
        self._pipe.close()
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def call_all(processes: Sequence[Process], method: str, *args: Any) -> list[Any]:
    """Calls a method of all at once; what each returned."""
    for process in processes:
        process.begin(method, *args)
    return [process.end() for process in processes]


def _serve(pipe: Connection, factory: Callable[..., Any], args: tuple[Any, ...]) -> None:
    held: Any = None
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            break
        try:
            held = held or factory(*args)
            pipe.send((True, getattr(held, method)(*arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    if hasattr(held, "close"):
        held.close()
