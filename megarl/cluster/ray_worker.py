"""The Ray actor around a plain class, and references to the results that stay in the object store."""

from __future__ import annotations

import faulthandler
import functools
import importlib
import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any, Generic, TypeVar, cast

from ray import ObjectRef

from megarl.cluster import ray_api
from megarl.cluster.placement import visible_devices
from megarl.errors import RunError

T = TypeVar("T")


class ChunkRefs(Generic[T]):
    """References to values in the object store, by chunk.

    Reading a chunk fetches it, once. A worker releases the chunks that it has read at the end of the call, with the
    call's arguments.
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
    def joined(cls, parts: Iterable[ChunkRefs[T]]) -> ChunkRefs[T]:
        """Returns the chunks of all parts, numbered consecutively."""
        refs = [ref for part in parts for _, ref in sorted(part._refs.items())]
        return ChunkRefs(dict(enumerate(refs)))

    def __reduce__(self) -> tuple[type[ChunkRefs[T]], tuple[dict[int, ObjectRef[T]]]]:
        return ChunkRefs, (self._refs,)


@dataclass(frozen=True, kw_only=True)
class Timed(Generic[T]):
    """A result for the driver, and the duration of the method."""

    result: T
    seconds: float


class RayWorker:
    """Creates an object at the first call, and runs its methods one at a time, in the order of the calls.

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
        local_devices: tuple[int, ...] | None,
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
        self._target, self._args, self._kwargs = target, args, kwargs
        self._reserved: list[socket.socket] = []

    @functools.cached_property
    def _object(self) -> Any:
        module, _, name = self._target.partition(":")
        return getattr(importlib.import_module(module), name)(*self._args, **self._kwargs)

    def run(
        self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], chunks: Sequence[int] | None = None
    ) -> Any:
        """Runs a method, and returns its result, `Timed`.

        With `chunks`, the method returns a dict by chunk, or such a dict and a result for the driver. The latter, or
        None, is returned first, `Timed`, and the values of `chunks` follow, each as an object of its own.
        """
        start = time.perf_counter()
        result = getattr(self._object, method)(*args, **kwargs)
        seconds = time.perf_counter() - start
        if chunks is None:
            return Timed(result=result, seconds=seconds)
        by_chunk, small = cast("tuple[Any, Any]", result) if isinstance(result, tuple) else (result, None)
        first = Timed(result=small, seconds=seconds)
        return (first, *(by_chunk[chunk] for chunk in chunks)) if chunks else first

    def run_stream(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
        """Yields both parts of each pair that the method yields, as separate objects."""
        for small, large in getattr(self._object, method)(*args, **kwargs):
            yield small
            yield large

    def free_address(self, host: str | None) -> Timed[str]:
        """Returns `host:port` with a free port of this process; without a host, of the node's address.

        The port stays reserved as long as the process lives: torch listens at it much later.
        """
        host = host or ray_api.node_address()
        holder = socket.socket()
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # torch's socket can bind it, too
        holder.bind(("", 0))  # all addresses, as torch does
        self._reserved.append(holder)
        return Timed(result=f"{host}:{holder.getsockname()[1]}", seconds=0.0)


def _print_to(log_file: str) -> None:
    """Sends the output of this process and its children to a file, and the stack of a crash."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.enable(file=2)
