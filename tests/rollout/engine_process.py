"""A process for rollout engines: vLLM takes over the process that it runs in, so the tests keep it out of theirs."""

from __future__ import annotations

import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megarl.rollout.engine import RolloutEngine
from tests.leftovers import track_own_resources


class RemoteError(Exception):
    """A call failed in the engine's process; the text begins with the exception's type and message."""


class EngineProcess:
    """Hosts one engine at a time; an engine that is started replaces the one before, which saves vLLM's import.

    One that did not answer was killed; the next engine gets a process of its own.

    Args:
        temporary: directory for the process's temporary files.
    """

    def __init__(self, temporary: Path) -> None:
        self._temporary = temporary
        self._spawn()

    def _spawn(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._temporary))
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def start(self, **arguments: Any) -> None:
        """Starts a RolloutEngine with these arguments."""
        if not self._process.is_alive():
            self._spawn()
        self._pipe.send(("start", arguments))
        self.end(timeout=280.0)

    def call(self, method: str, *args: Any) -> Any:
        """Calls a method of the engine."""
        self.begin_call(method, *args)
        return self.end()

    def begin_call(self, method: str, *args: Any) -> None:
        """Begins such a call; ``end`` waits for it."""
        self._pipe.send(("apply", (_method, (method, *args))))

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls ``function(engine, *args)`` there; the function is at the top of a module."""
        self._pipe.send(("apply", (function, args)))
        return self.end()

    def end(self, timeout: float = 120.0) -> Any:
        """What the call that began returned."""
        if not self._pipe.poll(timeout):
            self.kill()
            raise RemoteError(f"no answer within {timeout:.0f} s")
        ok, value = self._pipe.recv()
        if not ok:
            raise RemoteError(value)
        return value

    def close(self) -> None:
        """Closes the engine and ends the process."""
        self._pipe.close()
        self._process.join(30)
        self.kill()

    def kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _method(engine: RolloutEngine, name: str, *args: Any) -> Any:
    return getattr(engine, name)(*args)


def _serve(pipe: Connection, temporary: Path) -> None:
    """Answers calls until the other end closes."""
    os.environ["TMPDIR"] = str(temporary)
    track_own_resources()
    engine: RolloutEngine | None = None
    while True:
        try:
            kind, payload = pipe.recv()
        except EOFError:
            break
        try:
            if kind == "start":
                if engine is not None:
                    engine.close()
                    engine = None
                    gc.collect()  # which frees its memory
                engine = RolloutEngine(**payload)
                pipe.send((True, engine.start()))
            else:
                function, args = payload
                pipe.send((True, function(engine, *args)))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    if engine is not None:
        engine.close()
