"""Moves the actor's weights into the engines: one plan for a run, one transfer per version."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megarl.cluster.calls import Call, Process, WorkerError
from megarl.cluster.engines import RolloutGroup
from megarl.cluster.session import Session
from megarl.cluster.trainers import RemoteRole
from megarl.config import PPOConfig, RAFTConfig, parse_devices
from megarl.megatron.worker import MegatronWorker
from megarl.models import model_spec
from megarl.resharding import ConnectRequest, SyncSpec, SyncStats, serve_store
from megarl.resharding.holders import plan_sync
from megarl.rollout.engine import RolloutEngine
from megarl.weights.topology import Place

_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """The measurements of one sync.

    Args:
        version: version of the weights that every engine rank has committed.
        nbytes: bytes received by all engine ranks.
        messages: number of messages received.
        staging_bytes: largest size of the buffers in one rank.
        stages: seconds of the slowest rank in each stage of `SyncStats`, and in `offload`, which is the time to free
            memory on shared devices.
    """

    version: int
    nbytes: int
    messages: int
    staging_bytes: int
    seconds: float
    stages: Mapping[str, float]

    @classmethod
    def of(cls, senders: Sequence[SyncStats], receivers: Sequence[SyncStats], seconds: float) -> SyncReport:
        """Combines the measurements of all ranks."""
        ranks = [*senders, *receivers]
        stages = dict.fromkeys(stage for rank in ranks for stage in rank.seconds)
        return cls(
            version=receivers[0].version,
            nbytes=sum(rank.nbytes for rank in receivers),
            messages=sum(rank.messages for rank in receivers),
            staging_bytes=max(rank.peak_staging_bytes for rank in ranks),
            seconds=seconds,
            stages={stage: max(rank.seconds.get(stage, 0.0) for rank in ranks) for stage in stages},
        )

    def with_offload(self, seconds: float) -> SyncReport:
        """Returns the report with further seconds of the stage `offload`."""
        return replace(self, stages={**self.stages, "offload": self.stages.get("offload", 0.0) + seconds})

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


class Resharder:
    """The connection between the ranks of the actor's group and those of the engines, numbered in this order."""

    def __init__(
        self, session: Session, config: PPOConfig | RAFTConfig, actor: RemoteRole, engines: RolloutGroup
    ) -> None:
        self._senders, self._receivers = actor.group.named(actor.name), engines
        self._connected: list[Process[RolloutEngine]] = []
        self._connections = itertools.count(1)
        self._first, self._tp = len(self._senders.processes), config.rollout.tp
        places = [Place(node=slot.node, device=slot.device) for slot in session.placement.slots]
        trainers = [places[device] for device in config.device_list(actor.group.name)]
        engine_ranks = [places[device] for device in parse_devices(config.rollout.devices)]
        spec, bucket_bytes = model_spec(config.model.hf_config()), int(config.resharding.bucket_mib * _MIB)
        transfers = plan_sync(spec, actor.layout, trainers, self._tp, engine_ranks, bucket_bytes)
        self._store = serve_store(session.host)
        self._spec = SyncSpec.of(
            transfers,
            name="actor-to-engines",  # with a number for each connection
            host=session.host,
            port=self._store.port,
            places=[*trainers, *engine_ranks],
            device=config.cluster.device,
            transport=config.resharding.transport,
            verify=config.resharding.verify,
            timeout_s=config.cluster.time_limits.patience,
        )

    def connect(self) -> Call[None]:
        """Sends every rank its part of the plan, and connects all ranks; ends an earlier connection."""
        self._connected = list(self._receivers.processes)
        self._spec = replace(self._spec, name=f"actor-to-engines-{next(self._connections)}")
        starts = [self._first + engine * self._tp for engine in range(len(self._receivers.processes))]
        self._senders.call_each(MegatronWorker.connect, [self._request(range(r, r + 1)) for r in range(self._first)])
        return self._receivers.call_each(
            RolloutEngine.connect, [self._request(range(start, start + self._tp)) for start in starts]
        )

    def sync(self, version: int) -> SyncReport:
        """Sends the actor's weights, and waits until every rank has committed the version.

        Args:
            version: not lower than the last one.

        Raises:
            WorkerError: The sync was aborted, or a process failed.
        """
        start = time.perf_counter()
        if self._connected != self._receivers.processes:
            self._receivers.wait_for_replacements()
            self.connect().wait()
        sent = self._senders.call(MegatronWorker.send_weights, version)
        received = self._receivers.call(RolloutEngine.receive_weights, version)
        try:
            senders = sent.wait()
            receivers = [rank for engine in received.wait() for rank in engine]
        except WorkerError as error:
            raise WorkerError(
                f"{error}\nThe ranks of a sync are those of the actor's group, 0 to {self._first - 1}, and from "
                f"{self._first} on those of the engines, {self._tp} of each."
            ) from None
        assert {rank.version for rank in (*senders, *receivers)} == {version}, "a rank has not committed the version"
        self._receivers.readmit()
        return SyncReport.of(senders, receivers, time.perf_counter() - start)

    def _request(self, ranks: Sequence[int]) -> ConnectRequest:
        return ConnectRequest(sync=self._spec.only(ranks), ranks=ranks)
