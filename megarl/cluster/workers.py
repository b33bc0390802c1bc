"""Groups of processes that run objects of one class."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from ray import ObjectRef

from megarl.cluster.calls import Call, ChunkCall, Process
from megarl.cluster.process_usage import ProcessUsage
from megarl.cluster.ray_worker import ChunkRefs
from megarl.remote import RemoteMethod

if TYPE_CHECKING:
    from megarl.cluster.session import Session


class WorkerGroup[W]:
    """Processes with one object of class W each. Calls return at once; a process runs its calls in order.

    Args:
        name: prefix of the calls in messages, as in `name.method`.
    """

    def __init__(self, session: Session, name: str, processes: Sequence[Process[W]]) -> None:
        self.name = name
        self.processes = list(processes)
        self._session = session

    def named(self, name: str) -> WorkerGroup[W]:
        """Returns the same processes under another name."""
        return WorkerGroup(self._session, name, self.processes)

    def call[**P, R](self, method: RemoteMethod[W, P, R], *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """Calls a method on every process with the same arguments."""
        return self.submit(method, [args] * len(self.processes), kwargs)

    def call_each[Q, R](self, method: RemoteMethod[W, [Q], R], requests: Sequence[Q]) -> Call[R]:
        """Calls a method on the first `len(requests)` processes, with one request each."""
        return self.submit(method, [(request,) for request in requests])

    def call_at[**P, R](
        self, process: int, method: RemoteMethod[W, P, R], *args: P.args, **kwargs: P.kwargs
    ) -> Call[R]:
        """Calls a method on one process."""
        return self.submit(method, [args], kwargs, processes=[self.processes[process]])

    def call_one[Q, S, T](
        self,
        process: int,
        method: RemoteMethod[W, [Q], Future[tuple[dict[int, T], S]]],
        request: Q,
        chunks: Sequence[int],
    ) -> ChunkCall[S, T]:
        """Calls a method on one process, whose later calls do not wait for the end of this one."""
        return self.submit(method, [(request,)], chunks=[chunks], processes=[self.processes[process]])

    def submit(
        self,
        method: RemoteMethod[W, ..., Any],
        args: Sequence[tuple[object, ...]],
        kwargs: Mapping[str, object] | None = None,
        chunks: Sequence[Sequence[int]] | None = None,
        processes: Sequence[Process[W]] | None = None,
    ) -> ChunkCall[Any, Any]:
        """Calls a method on the first `len(args)` processes, with arguments that are not checked.

        Args:
            chunks: chunks of each process, whose results stay in the object store; None: all goes
                to the driver.
            processes: processes to call instead of the first ones of the group.
        """
        if processes is None:
            processes = self.processes[: len(args)]
        done: list[ObjectRef[Any]] = []
        refs: dict[int, ObjectRef[Any]] = {}
        for index, (process, arguments) in enumerate(zip(processes, args, strict=True)):
            numbers = None if chunks is None else chunks[index]
            run = process.actor.run.options(num_returns=1 + len(numbers or ()))
            given = (*method.args, *arguments)
            returned = run.remote(method.name, given, kwargs or {}, numbers, method.phase, next(process.numbers))
            if numbers:
                returned, *values = returned
                refs.update(zip(numbers, values, strict=True))
            done.append(returned)
        call = ChunkCall[Any, Any](
            label=f"{self.name}.{method.name}",
            phase=method.phase,
            processes=processes,
            done=done,
            monitor=self._session.monitor,
            chunks=ChunkRefs(refs),
        )
        return self._session.monitor.follow(call)

    async def take_usage(self) -> list[ProcessUsage]:
        """Returns what each process has used since the last reading."""
        return await self._call_usage(self.processes)

    def spawn[X](self, work: Coroutine[Any, Any, X]) -> asyncio.Task[X]:
        """Starts work beside that of the driver; its error ends both."""
        return self._session.monitor.spawn(work)

    def _call_usage(self, processes: Sequence[Process[W]]) -> Call[ProcessUsage]:
        done = [process.actor.usage.remote() for process in processes]
        return self._session.call(f"{self.name}.usage", "start", processes, done)
