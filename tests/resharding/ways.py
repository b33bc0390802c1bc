"""The transports between the four ranks of the sync tests."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from megarl.resharding import SyncSpec, serve_store
from megarl.resharding.spec import wire_ranks
from megarl.weights.plan import TransferPlan
from megarl.weights.planner import Place
from tests.resharding import jobs

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
    with multiprocessing.get_context("spawn").Pool(2) as processes:
        results = processes.starmap(jobs.colocated, [(rank, spec, device) for rank in range(2)], chunksize=1)
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
