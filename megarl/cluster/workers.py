"""Processes that run objects of one class, called together by the object's own methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from ray import ObjectRef

from megarl.cluster.calls import Call, ChunkCall, Process, StreamCall
from megarl.cluster.ray_worker import ChunkRefs
from megarl.remote import RemoteMethod

if TYPE_CHECKING:
    from megarl.cluster.session import Session

W = TypeVar("W")
P = ParamSpec("P")
Q = TypeVar("Q")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")


class WorkerGroup(Generic[W]):
    """Processes with an object of class W each. Calls return at once and run in the order in which they are made.

    Args:
        session: where they run.
        name: for messages, in which a call is ``name.method``.
        processes: at least one.
    """

    def __init__(self, session: Session, name: str, processes: Sequence[Process[W]]) -> None:
        self.name, self.processes = name, processes
        self._session = session

    def named(self, name: str) -> WorkerGroup[W]:
        """The same processes, whose calls have another name in messages."""
        return WorkerGroup(self._session, name, self.processes)

    def call(self, method: RemoteMethod[W, P, R], *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """Calls a method on every process with the same arguments."""
        return self.submit(method, [args] * len(self.processes), kwargs)

    def call_each(self, method: RemoteMethod[W, [Q], R], requests: Sequence[Q]) -> Call[R]:
        """Calls a method on the first processes, each with a request of its own."""
        return self.submit(method, [(request,) for request in requests])

    def submit(
        self,
        method: RemoteMethod[W, ..., R],
        args: Sequence[tuple[object, ...]],
        kwargs: Mapping[str, object] | None = None,
    ) -> Call[R]:
        """Calls a method with arguments that are not checked; see ``call`` and ``call_each``."""
        processes = self.processes[: len(args)]
        done: list[ObjectRef[Any]] = [
            process.actor.run.remote(method.name, own, kwargs or {})
            for process, own in zip(processes, args, strict=True)
        ]
        return self._session.monitor.follow(
            Call[R](
                label=f"{self.name}.{method.name}",
                phase=method.phase,
                processes=processes,
                done=done,
                monitor=self._session.monitor,
            )
        )

    @overload
    def call_by_chunk(
        self,
        method: RemoteMethod[W, [Q], tuple[dict[int, T], S] | None],
        requests: Sequence[Q],
        chunks: Sequence[Sequence[int]],
    ) -> ChunkCall[S | None, T]: ...
    @overload
    def call_by_chunk(
        self, method: RemoteMethod[W, [Q], dict[int, T] | None], requests: Sequence[Q], chunks: Sequence[Sequence[int]]
    ) -> ChunkCall[None, T]: ...
    def call_by_chunk(
        self, method: RemoteMethod[W, [Q], Any], requests: Sequence[Q], chunks: Sequence[Sequence[int]]
    ) -> ChunkCall[Any, Any]:
        """Calls a method as ``call_each``; the results by chunk stay where they are made, for other workers.

        Args:
            chunks: those of which each process has the results.
        """
        return self.submit_by_chunk(method, [(request,) for request in requests], chunks)

    def submit_by_chunk(
        self, method: RemoteMethod[W, ..., Any], args: Sequence[tuple[object, ...]], chunks: Sequence[Sequence[int]]
    ) -> ChunkCall[Any, Any]:
        """Calls a method with arguments that are not checked; see ``call_by_chunk``."""
        done: list[ObjectRef[Any]] = []
        by_chunk: dict[int, ObjectRef[Any]] = {}
        for process, own_args, own in zip(self.processes, args, chunks, strict=True):
            call = process.actor.run_by_chunk.options(num_returns=1 + len(own))
            refs = call.remote(method.name, own_args, own)
            first, *others = refs if own else [refs]
            by_chunk.update(zip(own, others, strict=True))
            done.append(first)
        return self._session.monitor.follow(
            ChunkCall[Any, Any](
                label=f"{self.name}.{method.name}",
                phase=method.phase,
                processes=self.processes,
                done=done,
                monitor=self._session.monitor,
                chunks=ChunkRefs(by_chunk),
            )
        )

    def stream(
        self, method: RemoteMethod[W, P, Iterator[tuple[S, T]]], *args: P.args, **kwargs: P.kwargs
    ) -> StreamCall[S, T]:
        """Calls a method that yields pairs on every process, with the same arguments."""
        streams: list[Any] = [
            process.actor.run_stream.options(num_returns="streaming").remote(method.name, args, kwargs)
            for process in self.processes
        ]
        return self._session.monitor.follow(
            StreamCall[S, T](
                label=f"{self.name}.{method.name}",
                phase=method.phase,
                processes=self.processes,
                done=[stream.completed() for stream in streams],
                monitor=self._session.monitor,
                streams=streams,
            )
        )
