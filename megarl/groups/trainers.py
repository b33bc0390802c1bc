"""The Megatron processes of a run, a group per set of devices, and the roles in them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate, Protocol, overload

import torch

from megarl.cluster.calls import Call, ChunkCall, Process
from megarl.cluster.process_usage import ProcessUsage
from megarl.cluster.session import Session
from megarl.cluster.workers import WorkerGroup
from megarl.config import ConfigError, Problem, RunConfig
from megarl.groups.engines import RolloutGroup
from megarl.megatron.worker import MegatronWorker
from megarl.remote import RemoteMethod
from megarl.rollout.vllm_environment import vllm_device
from megarl.types import Layout, RankSchedule, RoleName

_CHUNKS_PER_REPLICA = 8
"""Chunks of a step per DP rank of the role with the largest DP: enough to balance the ranks."""


class Scheduled(Protocol):
    """A replica's part of a request for one pass."""

    @property
    def schedule(self) -> RankSchedule: ...


class Divisible[Q](Protocol):
    """A request for all replicas of a role; see `megatron.worker_requests`."""

    def part(self, replica: int, /) -> Q: ...


class RemoteRole:
    """A role in its group. A call goes to every rank of the group, and returns at once."""

    def __init__(self, group: WorkerGroup[MegatronWorker], name: RoleName, layout: Layout) -> None:
        self.group = group
        self.layout = layout
        self.name: RoleName = name
        self._ranks = group.named(name)

    def call[**P, R](
        self, method: RemoteMethod[MegatronWorker, Concatenate[RoleName, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> Call[R]:
        """Calls a method with the same arguments on every rank."""
        return self._ranks.call(method.bind(self.name), *args, **kwargs)

    def dispatch[Q, R](self, method: RemoteMethod[MegatronWorker, [RoleName, Q], R], request: Divisible[Q]) -> Call[R]:
        """Calls a method with the part of the request of each rank's replica."""
        args = [(part,) for part in self._parts(request)]
        return self._ranks.submit(method.bind(self.name), args)

    @overload
    def dispatch_by_chunk[OnePass: Scheduled, S, T](
        self,
        method: RemoteMethod[MegatronWorker, [RoleName, OnePass], tuple[dict[int, T], S] | None],
        request: Divisible[OnePass],
    ) -> ChunkCall[S | None, T]: ...
    @overload
    def dispatch_by_chunk[OnePass: Scheduled, T](
        self,
        method: RemoteMethod[MegatronWorker, [RoleName, OnePass], dict[int, T] | None],
        request: Divisible[OnePass],
    ) -> ChunkCall[None, T]: ...
    def dispatch_by_chunk[OnePass: Scheduled](
        self, method: RemoteMethod[MegatronWorker, [RoleName, OnePass], Any], request: Divisible[OnePass]
    ) -> ChunkCall[Any, Any]:
        """Like `dispatch`, but the results by chunk stay in the object store."""
        parts = self._parts(request)
        chunks: list[Sequence[int]] = []
        for rank, part in enumerate(parts):
            chunks.append(part.schedule.chunks if self.layout.reports(rank) else [])
        args = [(part,) for part in parts]
        return self._ranks.submit(method.bind(self.name), args, chunks=chunks)

    def _parts[Q](self, request: Divisible[Q]) -> list[Q]:
        """Returns the part of each rank."""
        parts = [request.part(replica) for replica in range(self.layout.dp)]
        return [parts[self.layout.coords(rank).dp] for rank in range(self.layout.world_size)]


@dataclass(frozen=True, kw_only=True)
class Trainers:
    """The groups of a run and their roles, by name."""

    session: Session
    groups: Mapping[str, WorkerGroup[MegatronWorker]]
    roles: Mapping[RoleName, RemoteRole]

    def chunks(self, parts: int = 1) -> int:
        """Returns the maximum number of chunks of a step, enough for all replicas to share in each of its parts."""
        replicas = max((role.layout.dp for role in self.roles.values()), default=1)
        return max(_CHUNKS_PER_REPLICA, parts) * replicas

    async def start(self, model_dir: str) -> None:
        """Connects the ranks of every group, builds the roles and loads their weights; see `start_all`."""
        loading: list[Call[None]] = []
        for group in self.groups.values():
            address = await self.session.free_address(group.processes[0])
            group.call(MegatronWorker.start, f"tcp://{address}")
            loading.append(group.call(MegatronWorker.load, model_dir))
        await asyncio.gather(*loading)

    async def offload_all(self) -> None:
        """Offloads every role that can be offloaded."""
        calls = [group.call(MegatronWorker.offload_all) for group in self.groups.values()]
        await asyncio.gather(*calls)

    async def take_usage(self) -> dict[str, list[ProcessUsage]]:
        """Returns what each rank of each group has used since the last reading."""
        return {name: await group.take_usage() for name, group in self.groups.items()}


class Service(Protocol):
    """Processes beside trainers and the actor's engines."""

    async def start(self) -> None: ...

    def close(self) -> Call[None]: ...


async def start_all(
    trainers: Trainers, engines: RolloutGroup | None, services: Sequence[Service], model_dir: str, *, sleep: bool
) -> None:
    """Starts every launched process, and loads every model.

    Args:
        model_dir: Hugging Face directory of the model.
        sleep: whether engines share devices with the trainers. Then they end their start asleep,
            and the trainers start after them.

    Raises:
        WorkerError: A process failed to start.
    """
    spawn = trainers.session.spawn
    starting = [] if engines is None else [spawn(engines.start())]
    loading = [spawn(service.start()) for service in services]
    if sleep:
        await asyncio.gather(*starting)
    await trainers.start(model_dir)
    await asyncio.gather(*starting, *loading)


async def close_all(trainers: Trainers, engines: RolloutGroup | None = None, services: Sequence[Service] = ()) -> None:
    """Lets every process end by itself."""
    calls: list[Call[None]] = []
    if engines is not None:
        calls.append(engines.close())
    calls += [service.close() for service in services]
    for group in trainers.groups.values():
        calls.append(group.call(MegatronWorker.close))
    await asyncio.gather(*calls)


def launch_trainers(config: RunConfig, session: Session) -> Trainers:
    """Launches the processes of every group, and returns at once."""
    groups = {name: launch_group(session, config, name, MegatronWorker) for name in config.groups}
    roles: dict[RoleName, RemoteRole] = {}
    for name, group in config.groups.items():
        for role in group.roles:
            roles[role] = RemoteRole(groups[name], role, config.layout(role))
    return Trainers(session=session, groups=groups, roles=roles)


def launch_group[W](
    session: Session, config: RunConfig, name: str, worker: Callable[[RunConfig, str, int], W]
) -> WorkerGroup[W]:
    """Launches a process with a `worker` on each device of a group, and returns at once."""
    processes: list[Process[W]] = []
    for rank, device in enumerate(config.device_list(name)):
        made = partial(worker, config, name, rank)
        processes.append(session.launch(f"{name} rank {rank}", made, [device]))
    return WorkerGroup(session, name, processes)


def check_gpus(config: RunConfig) -> None:
    """Raises ConfigError if a run that starts Ray lacks GPUs on this machine, or has the vLLM of another device."""
    cluster = config.cluster
    if cluster.address is not None:
        return
    if not cluster.is_here:
        rule = "several nodes of GPUs need cluster.address"
        fix = "start it with megarl launch slurm or ray, or join a running Ray with cluster.address"
        raise ConfigError([Problem("cluster.nodes", str(cluster.nodes), rule, fix)])
    if cluster.device == "cuda":
        found = torch.cuda.device_count()
        if found < cluster.devices_per_node:
            rule = f"at most the GPUs of this machine, {found}"
            fix = "lower it, join a cluster with cluster.address, or set cluster.device=cpu"
            value = str(cluster.devices_per_node)
            raise ConfigError([Problem("cluster.devices_per_node", value, rule, fix)])
    built = vllm_device()
    if config.engine_settings is not None and built not in (None, cluster.device):
        rule = f"the installed vLLM is built for {built}"
        fix = f"set it to {built}, or install the other build of vLLM"
        raise ConfigError([Problem("cluster.device", cluster.device, rule, fix)])
