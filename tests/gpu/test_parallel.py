"""Several GPUs: layouts against one rank, transfers and syncs between ranks.

The same jobs run as "cpu" on virtual devices, with Gloo in place of NCCL; where they need no world of Megatron's, in
threads instead of processes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.types import Layout
from tests.gpu.conftest import need
from tests.megatron.test_parity import check_half_precision as check_outputs
from tests.megatron.test_parity import differences, expectations, infer, layout_id
from tests.megatron.test_recompute import check_half_precision, counted_updates
from tests.megatron.tiny import save_model
from tests.pool import RankPool
from tests.resharding import jobs
from tests.resharding.ways import SYNCS, Connections, Sync, in_threads

DEVICES = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.dist), pytest.param("cuda", marks=pytest.mark.gpu)]
)
LAYOUTS = (Layout(tp=2, sequence_parallel=True), Layout(pp=2), Layout(dp=2))


@pytest.fixture
def ranks(device: str, request: pytest.FixtureRequest) -> RankPool:
    """Two ranks at least."""
    return request.getfixturevalue("pool" if device == "cpu" else "two_gpus")


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_id)
@DEVICES
def test_two_ranks_compute_what_one_does(ranks: RankPool, tmp_path: Path, layout: Layout, device: str) -> None:
    """Log-probabilities, values and scores, and the losses and gradients of two optimizer steps."""
    directory = save_model(tmp_path / "model")
    results = ranks.run(infer, directory, layout, 40, world_size=2)
    # As in test_engine.py: numbers of about 10 in float32, whose sums are taken in another order.
    assert max(found.max() for found in differences(results, expectations(directory)).values()) <= 1e-4
    check_outputs(ranks, save_model(tmp_path / "half", dtype="bfloat16"), layout)

    def steps(layout: Layout, dtype: torch.dtype) -> list[list[dict[str, float]]]:
        found = ranks.run(counted_updates, directory, layout, "none", dtype, world_size=layout.world_size)
        coords = [layout.coords(rank) for rank in range(layout.world_size)]
        reports = [rank for rank, own in enumerate(coords) if own.tp == 0 and own.pp == layout.pp - 1]
        return [found[rank]["steps"] for rank in reports]

    (alone,) = steps(Layout(), torch.float32)
    for found in steps(layout, torch.float32):
        assert len(found) == 2
        for got, want in zip(found, alone, strict=True):
            assert got == pytest.approx(want, rel=1e-4)
    for found in steps(layout, torch.bfloat16):
        check_half_precision(found, alone)


def run_on(device: str, size: int, gpus: int) -> Callable[..., list[Any]]:
    """What calls a job as each of ``size`` ranks, each a process that sees one of the GPUs, or a thread."""
    if device == "cpu":
        return in_threads
    need(gpus)

    def run(job: Callable[..., Any], *args: Any, world_size: int) -> list[Any]:
        processes = RankPool(size, device=device, gpus=gpus)
        try:
            return processes.run(job, *args, world_size=world_size, connected=False)
        finally:
            processes.close()

    return run


@pytest.mark.parametrize("ranks", [2, 8])
@DEVICES
def test_every_rank_sends_to_every_other(device: str, ranks: int) -> None:
    """Buffers for which NCCL uses all blocks that it may."""
    nbytes = 1 << 16 if device == "cpu" else 32 << 20
    connections = Connections()
    args = connections.store.port, "exchange", ranks, nbytes, device
    results = run_on(device, ranks, ranks)(jobs.exchanged, *args, world_size=ranks)
    for rank, arrived in enumerate(results):
        assert arrived == {peer: [peer, 10 + peer] for peer in range(ranks) if peer != rank}


@pytest.mark.parametrize("case", SYNCS.values(), ids=SYNCS)
@DEVICES
def test_engines_load_what_trainers_have(device: str, case: Sync) -> None:
    case.check(Connections(), run_on(device, len(case.places), case.all_gpus), device)
