"""Moves the actor's weights into the engines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.cluster.calls import Call, Process
from megarl.cluster.session import Session
from megarl.cluster.workers import WorkerGroup
from megarl.config import RolloutTrainingConfig, parse_devices
from megarl.config.schema import Rollout
from megarl.groups.engines import RolloutGroup
from megarl.groups.sync_attempt import SyncAttempt
from megarl.groups.trainers import RemoteRole
from megarl.megatron.worker import MegatronWorker
from megarl.models import model_spec
from megarl.resharding import BarrierWatch, ConnectRequest, SyncSpec, SyncStats, serve_store
from megarl.resharding.spec import plan_sync
from megarl.role_specs import adapters_of
from megarl.rollout.engine import RolloutEngine
from megarl.weights.plan import TransferPlan
from megarl.weights.planner import Place

_MIB = 1 << 20


@dataclass(kw_only=True)
class SyncReport:
    """The measurements of one sync.

    Args:
        nbytes: bytes received by all engine ranks.
        messages: number of messages received.
        staging_bytes: largest size of the buffers in one rank.
        stages: seconds of the slowest rank in each stage of `SyncStats`, and in `offload`, which is
            the time to free memory on shared devices.
    """

    nbytes: int
    messages: int
    staging_bytes: int
    seconds: float
    stages: dict[str, float]

    @classmethod
    def of(cls, senders: Sequence[SyncStats], receivers: Sequence[SyncStats], seconds: float) -> SyncReport:
        """Combines the measurements of all ranks."""
        ranks = [*senders, *receivers]
        stages: dict[str, float] = {}
        for rank in ranks:
            for stage, taken in rank.seconds.items():
                stages[stage] = max(taken, stages.get(stage, 0.0))
        return cls(
            nbytes=sum(rank.nbytes for rank in receivers),
            messages=sum(rank.messages for rank in receivers),
            staging_bytes=max(rank.peak_staging_bytes for rank in ranks),
            seconds=seconds,
            stages=stages,
        )

    def add(self, later: SyncReport) -> None:
        """Adds the measurements of engines that were updated later."""
        self.nbytes += later.nbytes
        self.messages += later.messages
        self.staging_bytes = max(self.staging_bytes, later.staging_bytes)
        self.seconds += later.seconds
        for stage, seconds in later.stages.items():
            self.add_stage(stage, seconds)

    def add_stage(self, stage: str, seconds: float) -> None:
        """Adds to the seconds of a stage."""
        self.stages[stage] = self.stages.get(stage, 0.0) + seconds

    def metrics(self) -> dict[str, float]:
        """Returns the metrics `sync/*`."""
        return {
            "sync/bytes": self.nbytes,
            "sync/gb_per_second": self.nbytes / 1e9 / self.seconds,
            "sync/messages": self.messages,
            "sync/staging_bytes": self.staging_bytes,
            "sync/seconds": self.seconds,
            **{f"sync/{stage}_seconds": seconds for stage, seconds in self.stages.items()},
        }


class SyncPlanner:
    """Plans transfers to engines, once for the same ones, and serves the store where the ranks meet.

    A connection's ranks are those of the actor's group, then those of the engines, in this order.
    """

    def __init__(self, session: Session, config: RolloutTrainingConfig, actor: RemoteRole) -> None:
        self._config = config
        self._layout = actor.layout
        self.tp = config.rollout.tp
        count = config.cluster.devices_per_node
        devices = range(config.cluster.nodes * count)
        places = [Place(node=device // count, device=device) for device in devices]
        self._trainers = [places[device] for device in config.device_list(actor.group.name)]
        self._engine_ranks = [places[device] for device in parse_devices(config.rollout.devices)]
        self._plans: dict[tuple[tuple[int, ...], bool], TransferPlan] = {}
        self._adapters = None if config.separate_adapters is None else adapters_of(config.separate_adapters)
        self._host = session.host
        self._store = serve_store(session.host)

    @property
    def sends_once(self) -> bool:
        """Whether engines get the weights once, and then adapters alone."""
        return self._adapters is not None

    def spec(self, engines: Sequence[int], name: str, *, adapters_only: bool) -> SyncSpec:
        """Returns the specification of a connection; its name is new.

        Args:
            adapters_only: see ``plan``.
        """
        config = self._config
        return SyncSpec.of(
            self.plan(engines, adapters_only=adapters_only),
            name=name,
            host=self._host,
            port=self._store.port,
            places=[*self._trainers, *self._places(engines)],
            device=config.cluster.device,
            transport=config.resharding.transport,
            verify=config.resharding.verify,
            timeout_s=config.cluster.time_limits.patience,
        )

    def plan(self, engines: Sequence[int], *, adapters_only: bool = False) -> TransferPlan:
        """Returns the plan of a transfer to some engines.

        Args:
            adapters_only: whether they have the weights, and get adapters alone.
        """
        key = tuple(engines), adapters_only
        if key not in self._plans:
            spec = model_spec(self._config.model.hf_config())
            bucket_bytes = int(self._config.resharding.bucket_mib * _MIB)
            places = self._places(engines)
            self._plans[key] = plan_sync(
                spec,
                self._layout,
                self._trainers,
                self.tp,
                places,
                bucket_bytes,
                self._adapters,
                adapters_only=adapters_only,
            )
        return self._plans[key]

    def watch(self, spec: SyncSpec) -> BarrierWatch:
        """Returns the view of a connection's barriers."""
        return BarrierWatch(self._store, spec.name, spec.world_size)

    def _places(self, engines: Sequence[int]) -> list[Place]:
        places: list[Place] = []
        for engine in engines:
            places += self._engine_ranks[engine * self.tp : (engine + 1) * self.tp]
        return places


class EngineLink:
    """Engines that are updated together, by one connection with the actor's ranks.

    Where engines may be replaced, a sync in which one dies or hangs is done again with the others,
    over another connection. The new one takes part in the first sync after its start.

    Args:
        members: numbers of the engines.
        drain: whether engines finish their responses before a sync.
    """

    def __init__(
        self,
        number: int,
        members: Sequence[int],
        planner: SyncPlanner,
        senders: WorkerGroup[MegatronWorker],
        engines: RolloutGroup,
        *,
        drain: bool,
    ) -> None:
        self._number = number
        self._members = members
        self._planner = planner
        self._drain = drain
        self._senders = senders
        self._engines = engines
        self._connected: tuple[list[Process[RolloutEngine]], bool] = ([], False)
        self._with_weights: list[Process[RolloutEngine]] = []
        """Those that have the weights and need adapters alone."""
        self._connections = 0
        self._watch: BarrierWatch
        self._ranks: dict[int, int] = {}

    async def connect(self) -> bool:
        """Connects the actor's ranks with the engines that have started; returns whether all of these are connected.

        Every rank gets its part of the plan. An earlier connection ends, unless it is
        of the same processes.
        """
        engines = self._started
        wanted = self._wanted(engines)
        if self._connected == wanted:
            return True
        self._connected = ([], False)
        self._connections += 1
        _, adapters_only = wanted
        spec = self._planner.spec(
            engines,
            f"actor-to-engines-{self._number}-{self._connections}",
            adapters_only=adapters_only,
        )
        self._watch = self._planner.watch(spec)
        first = len(self._senders.processes)
        sent = self._senders.call_each(MegatronWorker.connect, [self._request(spec, [rank]) for rank in range(first)])
        self._ranks = {}
        received: dict[int, Call[None]] = {}
        for engine in engines:
            start = first + len(self._ranks)
            ranks = range(start, start + self._planner.tp)
            self._ranks |= dict.fromkeys(ranks, engine)
            received[engine] = self._engines.call_at(engine, RolloutEngine.connect, self._request(spec, ranks))
        attempt = SyncAttempt(self._engines, self._watch, self._ranks, sent, received)
        if not await attempt.succeeds() or attempt.lost:
            return False
        self._connected = wanted
        return True

    async def update(self, version: int) -> SyncReport | None:
        """Sends the actor's weights to the engines that have started, and waits until every rank has committed them.

        Returns None if there is no such engine.

        Raises:
            WorkerError: The sync was aborted though no engine was lost, or a process failed.
        """
        while engines := self._started:
            await self._engines.hold(engines, drain=self._drain)
            start = time.perf_counter()
            if engines != self._started or not await self.connect() or self._connected != self._wanted(engines):
                continue
            self._watch.begin()
            sent = self._senders.call(MegatronWorker.send_weights, version, self._number)
            received: dict[int, Call[list[SyncStats]]] = {}
            for engine in engines:
                received[engine] = self._engines.call_at(engine, RolloutEngine.receive_weights, version)
            attempt = SyncAttempt(self._engines, self._watch, self._ranks, sent, received)
            if not await attempt.succeeds():
                continue
            # One that has answered may be lost afterwards, while it generates.
            left: list[int] = []
            receivers: list[SyncStats] = []
            for engine, call in received.items():
                if self._processes([engine]) == call.processes:
                    left.append(engine)
                    receivers += call.results[0]
            if left:
                if self._planner.sends_once:
                    self._with_weights = self._processes(left)
                self._engines.readmit(left)
                return SyncReport.of([*sent.results.values()], receivers, time.perf_counter() - start)
        return None

    @property
    def _started(self) -> list[int]:
        return [engine for engine in self._members if engine in self._engines.started]

    def _wanted(self, engines: Sequence[int]) -> tuple[list[Process[RolloutEngine]], bool]:
        """Returns the processes of engines, and whether all of them have the weights."""
        processes = self._processes(engines)
        return processes, bool(processes) and all(process in self._with_weights for process in processes)

    def _processes(self, engines: Sequence[int]) -> list[Process[RolloutEngine]]:
        return [self._engines.processes[engine] for engine in engines]

    def _request(self, spec: SyncSpec, ranks: Sequence[int]) -> ConnectRequest:
        return ConnectRequest(sync=spec.only(ranks), ranks=ranks, link=self._number)


class Resharder:
    """The connections between the ranks of the actor's group and those of the engines.

    With `rollout.rolling_update` each half of the engines has one, and gets its weights while the
    other half generates.
    """

    def __init__(self, planner: SyncPlanner, rollout: Rollout, actor: RemoteRole, engines: RolloutGroup) -> None:
        self._engines = engines
        parts = [range(rollout.engines)]
        if rollout.rolling_update:
            parts = [range(first, rollout.engines, 2) for first in range(2)]
        senders = actor.group.named(actor.name)
        drain = rollout.mode != "inflight"
        self._links: list[EngineLink] = []
        for number, part in enumerate(parts):
            self._links.append(EngineLink(number, part, planner, senders, engines, drain=drain))
            planner.plan(part)

    async def connect(self) -> None:
        """Connects all ranks."""
        for link in self._links:
            await link.connect()

    async def sync(self, version: int) -> SyncReport:
        """Sends the actor's weights, and waits until every rank has committed the version.

        Replaced engines take part if they have started. Without any engine that has,
        it waits for one.

        Args:
            version: not lower than the last one.

        Raises:
            WorkerError: The sync was aborted, or a process failed.
        """
        report: SyncReport | None = None
        while report is None:
            await self._engines.until(lambda: bool(self._engines.started))
            for link in self._links:
                part = await link.update(version)
                if report is None:
                    report = part
                elif part is not None:
                    report.add(part)
        return report
