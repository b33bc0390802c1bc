"""The driver's environment variables and signal handlers during a session; both are restored afterwards."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ray import _raylet

from megarl.cluster.ray_node import new_directory

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_received: list[int] = []
"""Signals of the session: Python drops what a handler raises inside a destructor or a callback."""


@contextmanager
def environment(variables: Mapping[str, str]) -> Generator[None]:
    """Sets environment variables."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def temporary_directory() -> Generator[str]:
    """Makes a directory for all temporary files, also those of child processes; removes it at the end."""
    usual, directory = tempfile.gettempdir(), new_directory()
    try:
        with environment({"TMPDIR": directory}):
            tempfile.tempdir = directory  # the cached value of this process
            yield directory
    finally:
        tempfile.tempdir = usual
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def random_token() -> Generator[None]:
    """Protects a Ray that starts meanwhile with a random token."""
    try:
        with environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}):
            _read_authentication()
            yield
    finally:
        _read_authentication()


@contextmanager
def interrupts_raise() -> Generator[None]:
    """Makes SIGTERM raise SystemExit, as SIGINT raises KeyboardInterrupt, so that the main thread cleans up.

    Ray turns the exit status of a SIGTERM into 1 (ray 2.60, `raise_sys_exit_with_custom_error_message`), so every
    SystemExit of the block gets the status of SIGTERM.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    if _in_main_thread() and before[signal.SIGINT] is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    raise_on_sigterm()
    try:
        yield
    except SystemExit:
        raise SystemExit(128 + signal.SIGTERM) from None
    finally:
        _received.clear()
        if _in_main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def raise_on_sigterm() -> None:
    """In the main thread, makes the next SIGTERM raise SystemExit, and raises for a signal that came to nothing."""
    if _in_main_thread():
        signal.signal(signal.SIGTERM, _terminate)
        if _received:
            (_interrupt if _received[-1] == signal.SIGINT else _terminate)(_received[-1], None)


def ignore_interrupts() -> None:
    """Ignores SIGINT and SIGTERM, so that the cleanup can finish."""
    if _in_main_thread():
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _terminate(number: int, _frame: FrameType | None) -> None:
    ignore_interrupts()
    _received.append(number)
    raise SystemExit(128 + number)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    _received.append(number)
    raise KeyboardInterrupt


def _read_authentication() -> None:
    """Makes Ray read its authentication settings again: it caches them at import (ray 2.60)."""
    untyped: Any = _raylet
    untyped.Config.initialize("")
    untyped.AuthenticationTokenLoader.instance().reset_cache()
