"""CPU ranks on a machine with a GPU do not initialize CUDA; torch's Python side is patched to report a GPU."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.types import Layout
from tests.megatron.test_recompute import counted_updates
from tests.megatron.tiny import save_model
from tests.pool import RankPool, free_port


def _believing(directory: Path, init_method: str) -> tuple[dict[str, Any], list[str], str | None]:
    """Updates where torch is built for CUDA and has counted a device, what was started, and the visible devices."""
    started: list[str] = []
    calls: dict[str, Any] = {
        "_cuda_getDeviceCount": lambda: 1,
        "_cuda_init": lambda: started.append("CUDA"),
        "_cuda_getCurrentRawStream": lambda _: started.append("a stream"),
        "_accelerator_getAccelerator": lambda: torch.device("cuda"),
        "_accelerator_getStream": lambda _: started.append("a stream"),
    }
    for name, answer in calls.items():
        setattr(torch._C, name, answer)
    assert torch.cuda.is_available()
    assert torch.accelerator.current_accelerator(check_available=True) == torch.device("cuda")
    from megarl.megatron.platform import start_platform, start_world

    platform = start_platform("cpu")
    start_world(platform, rank=0, world_size=1, init_method=init_method)
    return counted_updates(0, directory, Layout(), "none"), started, os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.dist
def test_cpu_ranks_use_no_gpu(pool: RankPool, tmp_path: Path) -> None:
    directory = save_model(tmp_path / "model")
    (expected,) = pool.run(counted_updates, directory, Layout(), "none", world_size=1)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        call = process.submit(_believing, directory, f"tcp://127.0.0.1:{free_port()}")
        found, started, visible = call.result(timeout=200)
    assert started == []
    assert visible == ""
    torch.testing.assert_close(found["steps"], expected["steps"], rtol=0, atol=0)
    torch.testing.assert_close(found["weights"], expected["weights"], rtol=0, atol=0)


def _left_for_cuda(rank: int, directory: Path, layout: Layout) -> int:
    before = len(torch.cuda._queued_calls)
    counted_updates(rank, directory, layout, "none")
    return len(torch.cuda._queued_calls) - before


@pytest.mark.dist
def test_nothing_initializes_cuda(pool: RankPool, tmp_path: Path) -> None:
    """Sequence parallelism switches the random state of the device around dropout, also at rate 0."""
    directory, layout = save_model(tmp_path / "model"), Layout(tp=2, sequence_parallel=True)
    assert pool.run(_left_for_cuda, directory, layout, world_size=2) == [0, 0]
