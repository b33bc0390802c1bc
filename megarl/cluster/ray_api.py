"""Ray's functions, with types: its own annotations are incomplete."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import RayError, RayTaskError

from megarl.errors import RunError
from megarl.files import full_disk

untyped: Any = ray
_AGENT = "--dashboard_agent_command"
_TRIED = "2.60."
"""Version of Ray whose raylets are known to run without an agent."""
_RETRY_S = 0.1
START_S = 120.0
"""How long Ray's own processes may take to start; Ray (2.60, node.py) gives them 30 s."""


def init(**options: Any) -> None:
    """Starts or joins Ray, whose processes write nothing here."""
    untyped.init(log_to_driver=False, logging_level=logging.ERROR, **options)


def skip_idle_processes(*_: object) -> None:
    """Has the Ray that this process starts do without processes that would have nothing to do.

    `include_dashboard=False` still starts a process, for usage statistics, and waits for it; the
    log monitor is for drivers with `log_to_driver`, and an agent of each node for its metrics and
    the dashboard (ray 2.60). Each costs a second of a core. `ray start` calls this as its hook.
    """

    def nothing(*_: object, **__: object) -> None: ...

    node: Any = untyped._private.node.Node
    node.start_api_server = node.start_log_monitor = node.start_monitor = nothing
    services: Any = untyped._private.services
    tried = str(untyped.__version__).startswith(_TRIED)  # others may wait for more of the agent
    if tried and not hasattr(services.start_ray_process, "__wrapped__"):
        services.start_ray_process = _without_agent(services.start_ray_process)


def wait_for_slow_starts() -> None:
    """Has the Ray that this process starts wait `START_S` for its raylet, as on a busy machine."""
    services: Any = untyped._private.services
    if not hasattr(services.get_node, "__wrapped__"):
        services.get_node = patient(services.get_node, START_S)


def patient[T](find: Callable[..., T], seconds: float) -> Callable[..., T]:
    """Returns the function, tried again for so long where it raises RuntimeError."""

    @wraps(find)
    def tried(*args: Any) -> T:
        deadline = time.monotonic() + seconds
        while True:
            try:
                return find(*args)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_S)

    return tried


def _without_agent[T](start: Callable[..., T]) -> Callable[..., T]:
    """Returns Ray's function that starts a process, which gives a raylet an idle process in place of the agent.

    A raylet ends with its agent, and waits for the files with its ports, of which -1 is none.
    """

    @wraps(start)
    def changed(command: list[str], *args: Any, **options: Any) -> T:
        given = dict(part.split("=", 1) for part in command if "=" in part)
        if _AGENT in given:
            for port in ("metrics_agent", "metrics_export", "dashboard_agent_listen"):
                Path(given["--session_dir"], f"{port}_port_{given['--node_id']}").write_text("-1")
            command = [f"{_AGENT}=sleep infinity" if part.startswith(f"{_AGENT}=") else part for part in command]
        return start(command, *args, **options)

    return changed


def shutdown() -> None:
    """Ends or leaves Ray; SIGTERM keeps its handler, which Ray's core removes before it ends its processes (2.60)."""
    handler = signal.getsignal(signal.SIGTERM)
    node = untyped._private.worker._global_node

    def restore() -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)

    def end(kill: Callable[..., None], **options: Any) -> None:
        restore()
        kill(**options)

    if node is not None:
        node.kill_all_processes = partial(end, node.kill_all_processes)
    untyped.shutdown()
    restore()
    if node is not None:
        del node.kill_all_processes  # Ray calls the method again when the interpreter exits


def put[T](value: T) -> ObjectRef[T]:
    """Puts a value into the object store."""
    return untyped.put(value)


def get[T](ref: ObjectRef[T]) -> T:
    """Returns the value of a reference; raises RayError if the call that makes it failed."""
    return untyped.get(ref)


def wait(refs: Sequence[ObjectRef[Any]], *, count: int, timeout: float) -> list[ObjectRef[Any]]:
    """Waits until `count` references have a value or a failure, up to `timeout` seconds; returns those that do."""
    ready, _ = untyped.wait(list(refs), num_returns=count, timeout=timeout)
    return ready


def when_done[T](ref: ObjectRef[T], loop: asyncio.AbstractEventLoop, then: Callable[[Future[T]], object]) -> None:
    """Calls a function in the thread of a loop, with the future of a reference, when it has a value or a failure."""

    def pass_on(done: Future[T]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(then, done)

    ref.future().add_done_callback(pass_on)


def raised(error: RayTaskError) -> object:
    """Returns the exception that was raised in the process."""
    ray_error: Any = error
    return ray_error.cause


def repeats(error: BaseException) -> bool:
    """Returns whether a call failed because of the program, its data or its configuration, and not of a machine.

    torch raises a RuntimeError for CUDA, NCCL, Gloo and memory, the system an OSError, and Ray a
    RayError for an object that is lost.
    """
    cause = raised(error) if isinstance(error, RayTaskError) else error
    return isinstance(cause, RunError) or not isinstance(cause, RuntimeError | OSError | RayError)


def complete_message(error: RayTaskError) -> str | None:
    """Returns the message of an error whose traceback tells nothing more: a RunError, or a full disk."""
    cause = raised(error)
    return str(cause) if isinstance(cause, RunError) else full_disk(cause)


def end_of_ray(error: BaseException) -> str:
    """Returns which of Ray's own processes on this machine has ended, if an actor died with it; else "".

    A raylet that ends with its agent may still be ending; its actors then miss their owner, which
    is this process.
    """
    node = untyped._private.worker._global_node
    ended = [] if node is None else [name for name, _ in node.dead_processes()]
    if not ended and "its owner has died" not in str(error):
        return ""
    fix = "look for a lack of memory, or for who has ended it, and start the run again"
    return f"Ray's {' and '.join(ended) or 'raylet'} on this machine ended, and with it the run's processes; {fix}."


def node_address() -> str:
    """Returns the address of this node."""
    return untyped.util.get_node_ip_address()


def living_nodes() -> list[Mapping[str, Any]]:
    """Returns Ray's records of the living nodes."""
    return [node for node in untyped.nodes() if node["Alive"]]
