"""The driver's environment and signals for the time of a session; both as they were afterwards."""

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


@contextmanager
def environment(variables: Mapping[str, str]) -> Generator[None]:
    """Sets environment variables, which processes that start meanwhile inherit."""
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
    """A directory for all temporary files, Ray's and those of processes that start meanwhile; removed at the end."""
    usual, directory = tempfile.gettempdir(), new_directory()
    try:
        with environment({"TMPDIR": directory}):
            tempfile.tempdir = directory  # which this process has looked up already
            yield directory
    finally:
        tempfile.tempdir = usual
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def random_token() -> Generator[None]:
    """Lets a Ray that starts meanwhile answer nobody without its token."""
    try:
        with environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}):
            _read_authentication()
            yield
    finally:
        _read_authentication()


@contextmanager
def interrupts_raise() -> Generator[None]:
    """Lets SIGTERM raise SystemExit, as SIGINT raises KeyboardInterrupt, so that the main thread cleans up.

    While Ray starts it has handlers of its own, and while it waits it makes the status 1 of any (ray 2.60,
    ``raise_sys_exit_with_custom_error_message``): a SystemExit of the block gets that of SIGTERM.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    raise_on_sigterm()
    try:
        yield
    except SystemExit:
        raise SystemExit(128 + signal.SIGTERM) from None
    finally:
        if _in_main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def raise_on_sigterm() -> None:
    """Lets SIGTERM raise SystemExit, once; only the main thread can say so."""
    if _in_main_thread():
        signal.signal(signal.SIGTERM, _terminate)


def ignore_interrupts() -> None:
    """Lets the cleaning up finish; it takes seconds."""
    if _in_main_thread():
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _terminate(number: int, _frame: FrameType | None) -> None:
    ignore_interrupts()
    raise SystemExit(128 + number)


def _read_authentication() -> None:
    """Makes Ray read its authentication settings again: it does so at import, and keeps them (ray 2.60)."""
    untyped: Any = _raylet
    untyped.Config.initialize("")
    untyped.AuthenticationTokenLoader.instance().reset_cache()
