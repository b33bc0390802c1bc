"""The Ray actor around a plain class, and references to the results that stay in the object store."""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import os
import pkgutil
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, cast

from ray import ObjectRef

from megarl.cluster import ray_api
from megarl.cluster.kernel_profile import CallProfile, KernelProfiler
from megarl.cluster.placement import visible_devices
from megarl.cluster.process_usage import ProcessUsage, UsageMeter
from megarl.cluster.spans import Span, SpanLog
from megarl.errors import RunError
from megarl.garbage_collection import importing
from megarl.remote import Phase
from megarl.stacks import answer_signal
from megarl.texts import escape_output


class ChunkRefs[T]:
    """References to values in the object store, by chunk.

    Reading a chunk fetches it, once. A worker releases the chunks that it has read at the end of
    the call, with the call's arguments.
    """

    def __init__(self, refs: Mapping[int, ObjectRef[T]]) -> None:
        self._refs = dict(refs)
        self._fetched: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._refs)

    def __getitem__(self, chunk: int) -> T:
        if chunk not in self._fetched:
            self._fetched[chunk] = ray_api.get(self._refs[chunk])
        return self._fetched[chunk]

    def only(self, chunks: Iterable[int]) -> ChunkRefs[T]:
        """Returns the references to some chunks."""
        return ChunkRefs({chunk: self._refs[chunk] for chunk in chunks})

    @classmethod
    def put(cls, values: Iterable[T]) -> ChunkRefs[T]:
        """Puts values into the object store, where they live as long as the references."""
        return cls({index: ray_api.put(value) for index, value in enumerate(values)})

    @classmethod
    def of(cls, parts: Iterable[ChunkRefs[T]]) -> ChunkRefs[T]:
        """Returns the chunks of all parts, which keep their numbers, in the order of these."""
        refs: dict[int, ObjectRef[T]] = {}
        for part in parts:
            refs |= part._refs
        return ChunkRefs(dict(sorted(refs.items())))

    @classmethod
    def joined(cls, parts: Iterable[ChunkRefs[T]]) -> ChunkRefs[T]:
        """Returns the chunks of all parts, numbered consecutively."""
        refs: list[ObjectRef[T]] = []
        for part in parts:
            refs += dict(sorted(part._refs.items())).values()
        return ChunkRefs(dict(enumerate(refs)))

    def __reduce__(self) -> tuple[type[ChunkRefs[T]], tuple[dict[int, ObjectRef[T]]]]:
        return ChunkRefs, (self._refs,)


@dataclass(frozen=True, kw_only=True)
class Timed[T]:
    """A result for the driver, the duration of the method, and what the process has done since the last result."""

    result: T
    seconds: float = 0.0
    spans: tuple[Span, ...] = ()


class RayProcess:
    """A process with an object, which is created at the first call.

    Args:
        target: `package.module:Class`; its module is imported at the first call, with `env` set.
        directory: working directory of the driver and all processes of the run.
        local_devices: numbers of the process's GPUs on its node; None for a virtual device.
        log_file: receives the output of the process.

    Raises:
        RunError: This node does not have `directory` or the directory of the log.
    """

    def __init__(
        self,
        target: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        directory: str,
        env: Mapping[str, str],
        local_devices: Sequence[int] | None,
        log_file: str,
    ) -> None:
        for name, path in (("run.dir", os.path.dirname(log_file)), ("the driver's directory", directory)):
            if not os.path.isdir(path):
                here = f"node {socket.gethostname()} does not see {path}"
                raise RunError(f"{here}: {name} must be on a file system that all nodes share")
        _print_to(log_file)
        os.chdir(directory)
        # It removes the shared memory of a killed process, and must run before any is created.
        resource_tracker.ensure_running()
        # megatron-core imports wandb where it is installed; wandb makes directories that outlive a killed process.
        sys.modules["wandb"] = None  # pyright: ignore[reportArgumentType]
        os.environ.update(env)
        if local_devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices(local_devices, os.environ.get("CUDA_VISIBLE_DEVICES"))
        self._target = target
        self._args = args
        self._kwargs = kwargs
        self._reserved: list[socket.socket] = []
        self._spans = SpanLog()
        self._usage = UsageMeter()
        self._seconds = 0.0  # of the last call or step
        self._profiler = KernelProfiler()

    @functools.cached_property
    def _object(self) -> Any:
        with importing():
            cls: Any = pkgutil.resolve_name(self._target)
        return cls(*self._args, **self._kwargs)

    def free_address(self, host: str | None) -> Timed[str]:
        """Returns `host:port` with a free port of this process; without a host, of the node's address.

        The port stays reserved as long as the process lives: torch listens at it much later.
        """
        host = host or ray_api.node_address()
        holder = socket.socket()
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the store's socket can bind it, too
        holder.bind((host, 0))
        self._reserved.append(holder)
        return Timed(result=f"{host}:{holder.getsockname()[1]}")

    def usage(self) -> Timed[ProcessUsage]:
        """Returns what the process has used since the last reading."""
        return Timed(result=self._usage.take())

    @contextmanager
    def _measured(self, phase: Phase, name: str) -> Generator[None]:
        """Measures a call or a step that succeeds, and profiles it where it is to be."""
        self._usage.enter(phase)
        start = time.perf_counter()
        with self._profiler.call(phase, name):
            yield
        end = time.perf_counter()
        self._seconds = end - start
        self._usage.add(self._seconds)
        self._spans.add(name, start, end)


class RayWorker(RayProcess):
    """Runs the methods of its object one at a time, in the order of the calls."""

    def run(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        chunks: Sequence[int] | None = None,
        phase: Phase = "start",
        number: int = 0,
    ) -> Any:
        """Runs a method; returns the values of `_returned`."""
        del number  # they come in order
        with self._measured(phase, method):
            result = getattr(self._object, method)(*args, **kwargs)
        self._spans.close()
        return _returned(result, self._seconds, chunks, self._spans.take())

    def profile(self, trace: str | None) -> Timed[Sequence[CallProfile]]:
        """Begins to profile the calls; with the file of the trace, ends it and returns what the calls computed."""
        return Timed(result=self._profiler.switch(trace))


_PendingCall = tuple[Callable[[], Any], Future[Any]]
"""A call, and the future of its result."""


class SteppingRayWorker(RayProcess):
    """Runs the methods of its object in the order of the calls, and between them the object's `step()`.

    `step()` does a step of work that calls have begun, and returns whether there is more of it. A
    method may return a future of such work: its call ends when the future does, and later calls run
    meanwhile. All of it runs in one thread. Its spans have the names of the methods; steps have
    that of the last one that returned a future.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # No warning of `get`: calls fetch chunks in the thread below, not in the event loop.
        ray_api.untyped._private.worker.blocking_get_inside_async_warned = True
        self._calls: queue.SimpleQueue[_PendingCall] = queue.SimpleQueue()
        self._early: dict[int, _PendingCall] = {}
        self._next = 0
        self._work = "step"
        threading.Thread(target=self._loop, daemon=True).start()

    async def run(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        chunks: Sequence[int] | None,
        phase: Phase,
        number: int,
    ) -> Any:
        """Runs a method after those of smaller numbers, and waits for the future that it may return.

        Returns the values of `_returned`.
        """
        start = time.perf_counter()

        def call() -> Any:
            with self._measured(phase, method):
                result = getattr(self._object, method)(*args, **kwargs)
            if isinstance(cast("object", result), Future):
                self._work = method  # the steps work on it
            else:
                self._spans.close()
            return result

        done: Future[Any] = Future()
        self._early[number] = (call, done)
        while self._next in self._early:  # Ray may swap the calls of an asynchronous actor
            self._calls.put(self._early.pop(self._next))
            self._next += 1
        result = await asyncio.wrap_future(done)
        if isinstance(result, Future):
            result = await asyncio.wrap_future(cast("Future[Any]", result))
        return _returned(result, time.perf_counter() - start, chunks, self._spans.take())

    async def sign_of_life(self) -> None:
        """Returns at once, whatever the thread does."""

    async def profile(self, trace: str | None) -> Timed[Sequence[CallProfile]]:
        """Begins or ends a profile like `RayWorker.profile`, between two steps."""
        done: Future[Any] = Future()
        self._calls.put((functools.partial(self._profiler.switch, trace), done))
        return Timed(result=await asyncio.wrap_future(done))

    def _loop(self) -> None:
        """Runs calls as they come, and takes steps while there are none; an error in a step ends the process."""
        more = False
        try:
            while True:
                try:
                    call, done = self._calls.get(block=not more)
                except queue.Empty:
                    with self._measured("rollout", self._work):
                        more = self._object.step()
                    if not more:
                        self._spans.close()
                    continue
                try:
                    done.set_result(call())
                except Exception as error:
                    done.set_exception(error)
                more = "_object" in self.__dict__  # a call may have brought work
        except BaseException:
            traceback.print_exc()
            os._exit(1)


def _returned(result: Any, seconds: float, chunks: Sequence[int] | None, spans: tuple[Span, ...]) -> Any:
    """Returns the values that Ray stores for a result.

    Without `chunks`, it is the result, `Timed`. With `chunks`, the result is a dict by chunk, or
    such a dict and a result for the driver. The latter, or None, comes first, `Timed`, and the
    values of `chunks` follow, each as an object of its own.
    """
    if chunks is None:
        return Timed(result=result, seconds=seconds, spans=spans)
    by_chunk = result
    for_driver = None
    if isinstance(result, tuple):
        by_chunk, for_driver = cast("tuple[Any, Any]", result)
    first = Timed(result=for_driver, seconds=seconds, spans=spans)
    if not chunks:
        return first
    return (first, *(by_chunk[chunk] for chunk in chunks))


def _print_to(log_file: str) -> None:
    """Sends the output of this process and its children to a file, and the stack of a crash; answers with stacks."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    escape_output()
    faulthandler.enable(file=2)
    answer_signal(Path(log_file))
