"""torch's flight recorder of NCCL, which its builds for CUDA have."""

from __future__ import annotations

import time

import pytest

from megarl.stacks import IN_COLLECTIVE
from tests.pool import RankPool

pytestmark = pytest.mark.gpu


def _busy(_rank: int) -> list[list[str]]:
    import torch
    import torch.distributed as dist

    from megarl.megatron.parallel import GroupCache, collectives

    group, values = GroupCache().mine([(0,)], 0), torch.ones(3, 2, device="cuda")
    dist.all_reduce(values, group=group)
    torch.cuda.synchronize()
    torch.cuda._sleep(1 << 32)  # cycles, some seconds, after which the stream goes on
    dist.all_reduce(values, group=group)
    found = [collectives()]
    torch.cuda.synchronize()
    time.sleep(2.0)  # until the watchdog has seen it
    return [*found, collectives()]


def test_a_collective_in_progress_is_told(gpu: RankPool) -> None:
    ((during, afterwards),) = gpu.run(_busy, world_size=1)
    assert any(line.startswith("ranks 0: ") and f"{IN_COLLECTIVE}nccl:all_reduce" in line for line in during), during
    assert not any(IN_COLLECTIVE in line for line in afterwards), afterwards
