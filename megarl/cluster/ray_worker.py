"""The Ray actor around a plain class, which knows nothing of Ray; and references to what its methods leave in Ray."""

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
    """The chunks of a column by reference; reading one fetches that one, and keeps it as long as this object lives.

    A call's arguments live as long as the call, so that a worker holds what it reads no longer than that.

    Args:
        refs: by chunk.
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
        """The references to these chunks alone: what a rank is sent that reads no others."""
        return ChunkRefs({chunk: self._refs[chunk] for chunk in chunks})

    @classmethod
    def put(cls, values: Iterable[T]) -> ChunkRefs[T]:
        """Puts values of this process where every process can read them; they live as long as the references."""
        return cls({index: ray_api.put(value) for index, value in enumerate(values)})

    @classmethod
    def joined(cls, parts: Iterable[ChunkRefs[T]]) -> ChunkRefs[T]:
        """The chunks of all parts, numbered on from part to part."""
        refs = [ref for part in parts for _, ref in sorted(part._refs.items())]
        return ChunkRefs(dict(enumerate(refs)))

    def __reduce__(self) -> tuple[type[ChunkRefs[T]], tuple[dict[int, ObjectRef[T]]]]:
        return ChunkRefs, (self._refs,)


@dataclass(frozen=True, kw_only=True)
class Timed(Generic[T]):
    """The small result of a method, and how long it took, seconds."""

    result: T
    seconds: float


class RayWorker:
    """Makes an object at its first call, and runs its methods one at a time, in the order in which they were called.

    Args:
        target: ``package.module:Class``.
        args, kwargs: of the class.
        directory: where the driver works, and every process of its run with it.
        env: environment variables to set before the class's module is imported.
        local_devices: the process's GPUs, numbered on its node; None for a virtual device.
        log_file: where everything goes that the process prints.

    Raises:
        RunError: this node has no such directory, or none for the log.
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
        # It removes what this process shares and does not live to remove: it must run before anything is shared.
        resource_tracker.ensure_running()
        # megatron-core imports it where it is installed. It makes directories, which stay when this process is killed.
        sys.modules["wandb"] = None  # pyright: ignore[reportArgumentType]
        os.environ.update(env)
        if local_devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices(local_devices, os.environ.get("CUDA_VISIBLE_DEVICES"))
        self._target = target
        self._args = args
        self._kwargs = kwargs
        self._held: list[socket.socket] = []

    @functools.cached_property
    def _object(self) -> Any:
        module, _, name = self._target.partition(":")
        return getattr(importlib.import_module(module), name)(*self._args, **self._kwargs)

    def run(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Timed[Any]:
        """Returns the method's result."""
        start = time.perf_counter()
        result = getattr(self._object, method)(*args, **kwargs)
        return Timed(result=result, seconds=time.perf_counter() - start)

    def run_by_chunk(self, method: str, args: tuple[Any, ...], chunks: Sequence[int]) -> Any:
        """Returns the method's results as separate objects: the small one, then those of the chunks in this order.

        The method returns a mapping from chunk to value, or such a mapping and something small. Without
        chunks, Ray expects the first object alone.
        """
        timed = self.run(method, args, {})
        by_chunk, small = timed.result, None
        if isinstance(by_chunk, tuple):
            by_chunk, small = cast("tuple[Any, Any]", by_chunk)
        first = Timed(result=small, seconds=timed.seconds)
        return (first, *(by_chunk[chunk] for chunk in chunks)) if chunks else first

    def run_stream(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
        """Yields both parts of the pairs that the method yields as separate objects: what is small, then what stays."""
        for small, large in getattr(self._object, method)(*args, **kwargs):
            yield small
            yield large

    def free_address(self, host: str | None) -> Timed[str]:
        """Returns a host and port at which this process may listen; None is the node's own address.

        The port is held as long as this process lives: it listens only when it has imported torch, and meanwhile the
        system would give the port to others.
        """
        host = host or ray_api.node_address()
        holder = socket.socket()
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # which lets torch's own socket bind it too
        holder.bind(("", 0))  # as torch does: on one address, it could be another's on the others
        self._held.append(holder)
        return Timed(result=f"{host}:{holder.getsockname()[1]}", seconds=0.0)


def _print_to(log_file: str) -> None:
    """Sends standard output and error, the children's too, to a file; crashes leave their stack there."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.enable(file=2)
