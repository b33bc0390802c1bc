"""The transports between the four ranks of the sync tests."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from megarl.models import ModelSpec, model_spec
from megarl.resharding import SyncSpec, serve_store
from megarl.resharding.spec import engine_holders, trainer_holders, wire_ranks
from megarl.types import Layout
from megarl.weights.plan import TransferPlan
from megarl.weights.planner import Holder, Place, plan
from tests.resharding import jobs
from tests.weights.models import qwen2_config

WAYS = ("shared", "gloo", "mixed", "two hops")


class Connections:
    """Makes specs that name one store."""

    def __init__(self) -> None:
        self.store = serve_store()
        self.count = 0

    def __call__(self, plan: TransferPlan, way: str = "shared", **options: Any) -> SyncSpec:
        """A spec.

        Args:
            way: ``mixed`` has a trainer and an engine rank on either node, so that engines get both kinds; in ``two
                hops`` each trainer is the owner of the receive buffer of an engine rank, as where they share a GPU.
        """
        places = [Place(node=rank % 2 if way == "mixed" else 0) for rank in range(jobs.RANKS)]
        if way == "gloo":
            options["transport"] = way
        spec = self.spec(plan, places, **options)
        return in_two_hops(spec) if way == "two hops" else spec

    def spec(self, plan: TransferPlan, places: Sequence[Place], **options: Any) -> SyncSpec:
        self.count += 1
        address = {"name": f"sync{self.count}", "host": "127.0.0.1", "port": self.store.port}
        return SyncSpec.of(plan, places=places, **{"timeout_s": 20.0, **address, **options})

    def colocated(self, plan: TransferPlan) -> SyncSpec:
        """A spec of rank 0, a trainer, and rank 1, an engine on its device; the trainer owns the memory."""
        spec = self.spec(plan, [Place(device=0)] * 2, device="cuda", timeout_s=300.0)
        assert spec.recv_buffers[1].owner == 0
        return spec


def check_colocated(device: str) -> None:
    """A sync of a trainer and an engine on one device, in a process each; the trainer's has the receive buffer."""
    plan, connections = jobs.single_plan(), Connections()
    spec = connections.colocated(plan)
    args = spec, jobs.single_holders(), jobs.spec_of(), device
    with multiprocessing.get_context("spawn").Pool(2) as processes:
        results = processes.starmap(jobs.synced, [(rank, *args) for rank in range(2)], chunksize=1)
    (sent, _), (received, loaded) = results
    assert sent.nbytes == received.nbytes == plan.receivers[1].nbytes
    assert (sent.peak_staging_bytes > 0, received.peak_staging_bytes) == (True, 0)
    for name, tensor in jobs.weights(jobs.single_map()).items():
        assert torch.equal(loaded[name], tensor), name


def in_two_hops(spec: SyncSpec) -> SyncSpec:
    """Makes each trainer the owner of the receive buffer of an engine rank."""
    recv_buffers = {
        receiver: replace(buffer, owner=owner, via_network=frozenset({1 - owner}), depth=1)
        for owner, (receiver, buffer) in enumerate(sorted(spec.recv_buffers.items()))
    }
    return replace(spec, recv_buffers=recv_buffers, wire=wire_ranks(recv_buffers))


@dataclass(frozen=True, kw_only=True)
class Sync:
    """Trainers and engines on GPUs, eight to a node.

    Args:
        tp: of each engine.
        gpus: of the engines.
        colocated: whether engines are on the GPUs of the trainers, or on the next ones.
    """

    layout: Layout
    tp: int
    gpus: int
    colocated: bool

    @property
    def all_gpus(self) -> int:
        return max(self.layout.world_size, self.gpus) if self.colocated else self.layout.world_size + self.gpus

    @property
    def places(self) -> list[Place]:
        """By rank: the trainers', then the engines'."""
        first = 0 if self.colocated else self.layout.world_size
        devices = [*range(self.layout.world_size), *range(first, first + self.gpus)]
        return [Place(node=device // 8, device=device) for device in devices]

    def holders(self, model: ModelSpec) -> list[Holder]:
        trainers = self.layout.world_size
        sources = trainer_holders(model, self.layout, self.places[:trainers])
        return [*sources, *engine_holders(model, self.tp, self.places[trainers:], first=trainers)]

    def check(
        self, connections: Connections, run: Callable[..., list[Any]], device: str, timeout_s: float = 60.0
    ) -> SyncSpec:
        """Syncs once, and compares what engines have loaded with their shards of the model.

        Args:
            run: calls a function with the rank and arguments for all ranks at once; returns the results.
        """
        model = model_spec(qwen2_config(hidden_size=48, num_attention_heads=8, num_key_value_heads=8))
        holders, trainers = self.holders(model), self.layout.world_size
        transfer = plan(holders[:trainers], holders[trainers:], 16384)
        spec = connections.spec(transfer, self.places, device="cuda", timeout_s=timeout_s)
        results = run(jobs.synced, spec, holders, model, device, world_size=spec.world_size)
        for holder, (_, loaded) in zip(holders[trainers:], results[trainers:], strict=True):
            expected = jobs.weights(holder.map, model=model)
            assert loaded.keys() == expected.keys()
            assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items()), holder.rank
        return spec


SYNCS = {
    "TP2 to 2 engines": Sync(layout=Layout(tp=2), tp=1, gpus=2, colocated=True),
    "PP2 to an engine of TP2": Sync(layout=Layout(pp=2), tp=2, gpus=2, colocated=True),
    "TP2 to an engine of TP2 on other GPUs": Sync(layout=Layout(tp=2), tp=2, gpus=2, colocated=False),
    "TP2 x DP2 to 2 engines of TP2": Sync(layout=Layout(tp=2, dp=2), tp=2, gpus=4, colocated=True),
    "TP8 to 8 engines": Sync(layout=Layout(tp=8), tp=1, gpus=8, colocated=True),
    "TP8 to 8 engines of another node": Sync(layout=Layout(tp=8), tp=1, gpus=8, colocated=False),
}


def in_threads(job: Callable[..., Any], *args: Any, world_size: int) -> list[Any]:
    """Calls a job as all ranks, each in a thread of this process."""
    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(lambda rank: job(rank, *args), range(world_size)))
