"""The trainers of a run: a group of Megatron processes for each group of devices, and the roles in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

import torch

from megarl.cluster.calls import Call, ChunkCall
from megarl.cluster.engines import RolloutGroup
from megarl.cluster.scorers import RuleScorers, ScoringProcess
from megarl.cluster.session import Session
from megarl.cluster.workers import WorkerGroup
from megarl.config import ConfigError, Problem, RunConfig
from megarl.megatron.worker import MegatronWorker
from megarl.remote import RemoteMethod
from megarl.rollout.engine import RolloutEngine
from megarl.types import Layout, RankSchedule, RoleName

W = TypeVar("W")
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

_CHUNKS_PER_REPLICA = 8
"""Chunks of a step for each DP rank of the role that has most of them: small enough to share the work evenly."""


class Scheduled(Protocol):
    """A rank's part of a request that has one schedule."""

    @property
    def schedule(self) -> RankSchedule: ...


Q = TypeVar("Q")
Q_co = TypeVar("Q_co", covariant=True)
OnePass = TypeVar("OnePass", bound=Scheduled)


class Divisible(Protocol[Q_co]):
    """A request for all ranks of a role; see ``megatron.worker_requests``."""

    def part(self, replica: int, /) -> Q_co: ...


class RemoteRole:
    """A role in its group. Calls go to every rank and return at once; the methods are those of MegatronWorker.

    Args:
        group: that it is placed in.
        name: of the role.
        layout: of the role.
    """

    def __init__(self, group: WorkerGroup[MegatronWorker], name: RoleName, layout: Layout) -> None:
        self.group, self.layout = group, layout
        self.name: RoleName = name
        self._ranks = group.named(name)

    def call(
        self, method: RemoteMethod[MegatronWorker, Concatenate[RoleName, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> Call[R]:
        """Calls a method of the role on every rank, with the same arguments."""
        return self._ranks.submit(method, [(self.name, *args)] * self.layout.world_size, kwargs)

    def dispatch(self, method: RemoteMethod[MegatronWorker, [RoleName, Q], R], request: Divisible[Q]) -> Call[R]:
        """Calls a method of the role on every rank, with its replica's part of the request."""
        return self._ranks.submit(method, [(self.name, part) for part in self._parts(request)])

    @overload
    def dispatch_by_chunk(
        self,
        method: RemoteMethod[MegatronWorker, [RoleName, OnePass], tuple[dict[int, T], S] | None],
        request: Divisible[OnePass],
    ) -> ChunkCall[S | None, T]: ...
    @overload
    def dispatch_by_chunk(
        self,
        method: RemoteMethod[MegatronWorker, [RoleName, OnePass], dict[int, T] | None],
        request: Divisible[OnePass],
    ) -> ChunkCall[None, T]: ...
    def dispatch_by_chunk(
        self, method: RemoteMethod[MegatronWorker, [RoleName, OnePass], Any], request: Divisible[OnePass]
    ) -> ChunkCall[Any, Any]:
        """Calls a method as ``dispatch``; the results by chunk stay with the reporting ranks, for other workers."""
        parts = self._parts(request)
        chunks = [part.schedule.chunks if self.layout.reports(rank) else [] for rank, part in enumerate(parts)]
        return self._ranks.submit_by_chunk(method, [(self.name, part) for part in parts], chunks)

    def _parts(self, request: Divisible[Q]) -> list[Q]:
        """The part of each rank."""
        parts = [request.part(replica) for replica in range(self.layout.dp)]
        return [parts[self.layout.coords(rank).dp] for rank in range(self.layout.world_size)]


@dataclass(frozen=True, kw_only=True)
class Trainers:
    """The groups of a run and the roles in them.

    Args:
        session: where they run.
        groups: by name.
        roles: by name.
    """

    session: Session
    groups: Mapping[str, WorkerGroup[MegatronWorker]]
    roles: Mapping[RoleName, RemoteRole]

    @property
    def chunks(self) -> int:
        """Into how many chunks the samples of a step are divided, at most."""
        return _CHUNKS_PER_REPLICA * max((role.layout.dp for role in self.roles.values()), default=1)

    def start(self, model_dir: str) -> None:
        """Connects the ranks of every group, builds the roles and loads their weights; waits for all of them.

        Args:
            model_dir: Hugging Face directory of the model.

        Raises:
            WorkerError: a process failed to start.
        """
        loading: list[Call[None]] = []
        for group in self.groups.values():
            address = self.session.free_address(group.processes[0])
            group.call(MegatronWorker.start, f"tcp://{address}")
            loading.append(group.call(MegatronWorker.load, model_dir))
        _wait(loading)

    def offload_all(self) -> None:
        """Offloads every role that may be; waits for all of them."""
        _wait([group.call(MegatronWorker.offload_all) for group in self.groups.values()])

    def close(self) -> None:
        """Lets every process end by itself; waits for all of them."""
        _wait([group.call(MegatronWorker.close) for group in self.groups.values()])


def _wait(calls: Sequence[Call[None]]) -> None:
    for call in calls:
        call.wait()


def start_all(
    trainers: Trainers, engines: RolloutGroup | None, rules: RuleScorers | None, model_dir: str, *, sleep: bool
) -> None:
    """Starts every process and loads every model; waits for all of them.

    Args:
        trainers, engines, rules: that were launched; None where there are none.
        model_dir: Hugging Face directory of the model.
        sleep: engines are asleep once they have started: before the trainers, as the devices cannot hold both at once.

    Raises:
        WorkerError: a process failed to start.
    """
    starting = None if engines is None else engines.call(RolloutEngine.start)
    loading = None if rules is None else rules.call(ScoringProcess.start)
    if sleep and starting is not None:
        starting.wait()
    trainers.start(model_dir)
    _wait([call for call in (starting, loading) if call is not None])


def launch_trainers(config: RunConfig, session: Session) -> Trainers:
    """Launches the processes of every group, and returns at once."""
    groups = {name: launch_group(session, config, name, MegatronWorker) for name in config.groups}
    roles: dict[RoleName, RemoteRole] = {
        role: RemoteRole(groups[name], role, config.layout(role))
        for name, group in config.groups.items()
        for role in group.roles
    }
    return Trainers(session=session, groups=groups, roles=roles)


def launch_group(
    session: Session, config: RunConfig, name: str, worker: Callable[[RunConfig, str, int], W]
) -> WorkerGroup[W]:
    """Launches a process per device of a group, and returns at once.

    Args:
        worker: class of their objects.
    """
    processes = [
        session.launch(f"{name} rank {rank}", [device], worker, config, name, rank)
        for rank, device in enumerate(config.device_list(name))
    ]
    return WorkerGroup(session, name, processes)


def check_gpus(config: RunConfig) -> None:
    """Checks that this machine has the GPUs, where the run starts a Ray of its own.

    Raises:
        ConfigError: it has fewer.
    """
    cluster = config.cluster
    if cluster.device == "cpu" or cluster.address is not None:
        return
    found = torch.cuda.device_count()
    if found < cluster.devices_per_node:
        rule = f"at most the GPUs of this machine, {found}"
        fix = "lower it, join a cluster with cluster.address, or set cluster.device=cpu"
        value = str(cluster.devices_per_node)
        raise ConfigError([Problem(field="cluster.devices_per_node", value=value, rule=rule, fix=fix)])
