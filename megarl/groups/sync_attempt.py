"""One attempt at a weight sync; tolerates engines that die or hang."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

from megarl.cluster.calls import Call, ProcessLostError, WorkerError
from megarl.groups.engines import RolloutGroup
from megarl.resharding import BarrierWatch, SyncError


class SyncAttempt:
    """A call on the actor's ranks and calls on engines, by engine.

    Where engines may be replaced, one that dies or hangs ends the attempt, as the
    others get out of it.

    Args:
        watch: barriers where all of them meet.
        ranks: engine of each rank of the engines.
    """

    def __init__(
        self,
        engines: RolloutGroup,
        watch: BarrierWatch,
        ranks: Mapping[int, int],
        sent: Call[Any],
        received: Mapping[int, Call[Any]],
    ) -> None:
        self._engines = engines
        self._watch = watch
        self._ranks = ranks
        self._sent = sent
        self._received = received
        self.lost: set[int] = set()
        self._hung: set[int] = set()
        self._extended: set[int | None] = set()
        for call in (sent, *received.values()):
            call.tolerates = SyncError
        for call in received.values():
            call.beside = sent  # the ranks may have other calls before it
        if engines.replaceable:
            sent.late = partial(self._extend, None)
            for engine, call in received.items():
                call.late = partial(self._extend, engine)
                call.survives_loss = True

    async def succeeds(self) -> bool:
        """Waits for all ranks; returns whether those that are left have done it.

        Raises:
            WorkerError: They have aborted it though no engine was lost, or a process failed.
        """
        receiving: list[asyncio.Task[None]] = []
        for engine, call in self._received.items():
            receiving.append(self._engines.spawn(self._receive(engine, call)))
        await self._sent
        for task in receiving:
            await task
        errors: list[str] = []
        for call in (self._sent, *self._received.values()):
            errors += call.errors.values()
        if errors and not self.lost:
            first = min(self._ranks)
            raise WorkerError(
                f"{errors[0]}\nThe ranks of a sync are those of the actor's group, 0 to {first - 1}, and from {first} "
                f"on those of the engines, {len(self._ranks) // len(self._received)} of each."
            )
        return not errors

    async def _receive(self, engine: int, call: Call[Any]) -> None:
        """Waits for an engine. Where it is lost, its end breaks its connections; those in a barrier are freed."""
        (process,) = call.processes
        try:
            await call
        except ProcessLostError as error:
            self.lost.add(engine)
            self._engines.replace(engine, process, str(error))
            self._watch.abort(str(error).splitlines()[0])

    def _extend(self, engine: int | None, message: str) -> bool:
        """Returns whether the actor's ranks, or an engine, are late because of another engine, which hangs.

        Raises:
            WorkerError: No engine is seen to hang, or they are late once more.
        """
        if not self._extended:
            self._hung = self._hanging()
        if not self._hung or engine in self._extended:
            raise WorkerError(message)
        self._extended.add(engine)
        return engine not in self._hung

    def _hanging(self) -> set[int]:
        """Returns the engines without a sign of life, and those that have not begun though all trainers have."""
        waiting = [engine for engine, call in self._received.items() if not call.finished and engine not in self.lost]
        hung = self._engines.silent(waiting)
        absent = self._watch.absent()
        if all(rank in self._ranks for rank in absent):
            hung |= {self._ranks[rank] for rank in absent}.intersection(waiting)
        return hung
