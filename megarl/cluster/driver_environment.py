"""The driver's environment variables and signal handlers during a session; both are restored afterwards."""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ray import _raylet
from ray._private import ray_constants

from megarl.cluster.ray_node import new_directory
from megarl.files import remove_tree

_STOPS = (signal.SIGTERM, signal.SIGUSR1)
_SIGNALS = (signal.SIGINT, *_STOPS, signal.SIGALRM)


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
    """Makes a directory for all temporary files, also those of child processes.

    At the end it is removed, and so are the environment variables that name it.
    """
    usual = tempfile.gettempdir()
    directory = new_directory()
    try:
        with environment({"TMPDIR": directory}):
            tempfile.tempdir = directory  # the cached value of this process
            yield directory
    finally:
        for name, value in list(os.environ.items()):
            if value.startswith(directory):  # torch names its cache there, for its children and for itself later
                del os.environ[name]
        tempfile.tempdir = usual
        remove_tree(directory)


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
def on_loopback() -> Generator[None]:
    """Makes a Ray that starts meanwhile listen on loopback alone, not on all addresses; its processes inherit it.

    `ray.init` replaces a loopback address by another one of the machine, unless this switch, which
    Ray reads when it is imported, says that there is no cluster (ray 2.60,
    `resolve_ip_for_localhost`).
    """
    constants: Any = ray_constants
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        with environment({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}):
            yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def interrupts_raise() -> Generator[None]:
    """Makes SIGTERM and SIGUSR1 raise SystemExit, as SIGINT raises KeyboardInterrupt: the main thread cleans up.

    Ray turns the exit status of a SIGTERM into 1 (ray 2.60,
    `raise_sys_exit_with_custom_error_message`), so every SystemExit of the block gets
    the status of SIGTERM.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    if _in_main_thread():
        for number in _STOPS:
            signal.signal(number, _terminate)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])  # a node agent blocks it for all that it starts
    try:
        yield
    except SystemExit:
        raise SystemExit(128 + signal.SIGTERM) from None
    finally:
        if _in_main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def noted_signals() -> Generator[Callable[[], bytes]]:
    """Yields a function that returns the numbers of the signals that came in the block, also of ignored interrupts.

    The interpreter writes them into a pipe, whichever handler a signal has. A block inside passes
    on what it noted.
    """
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False) if _in_main_thread() else None
    noted = bytearray()

    def received() -> bytes:
        noted.extend(pipe.read() or b"")
        return bytes(noted)

    with open(reader, "rb", buffering=0) as pipe, open(writer, "wb"):
        try:
            yield received
        finally:
            if before is not None:
                signal.set_wakeup_fd(before)
                if before >= 0 and received():
                    os.write(before, noted)


@contextmanager
def no_interrupt_is_lost() -> Generator[None]:
    """Within `interrupts_raise`, raises at the end of the block for a signal that came to nothing in it.

    Python drops what a handler raises inside a destructor or a callback, and `ray.init` replaces
    the handler of SIGTERM.
    """
    with noted_signals() as noted:
        yield
        if _in_main_thread():
            signal.signal(signal.SIGTERM, _terminate)
        received = noted()
    for number in _STOPS:
        if number in received:
            _terminate(number, None)
    if signal.SIGINT in received and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        raise KeyboardInterrupt


def ignore_interrupts() -> None:
    """Ignores the signals that end a run, so that the cleanup can finish."""
    if _in_main_thread():
        for number in _SIGNALS:
            signal.signal(number, _ignore)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Does nothing; unlike SIG_IGN, it lets `noted_signals` see the signal."""


def _terminate(number: int, _frame: FrameType | None) -> None:
    ignore_interrupts()
    raise SystemExit(128 + number)


def _read_authentication() -> None:
    """Makes Ray read its authentication settings again: it caches them at import (ray 2.60)."""
    untyped: Any = _raylet
    untyped.Config.initialize("")
    untyped.AuthenticationTokenLoader.instance().reset_cache()
