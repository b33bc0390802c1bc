"""What a sync copies out of a trainer's CUDA parameters and into an engine's, against the same copies on the CPU."""

from __future__ import annotations

import pytest
import torch

from megarl.resharding.buckets import pack, unpack
from tests.resharding.jobs import trainer_map, transfer_plan, weights

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_copies_are_bit_exact(cuda: str, dtype: str) -> None:
    plan = transfer_plan(dtype=dtype)
    messages = 0
    for rank, sender in plan.senders.items():
        on_cpu = weights(trainer_map(rank))
        on_gpu = {name: tensor.to(cuda) for name, tensor in on_cpu.items()}
        for message in sender.messages:
            frames = [torch.zeros(message.nbytes, dtype=torch.uint8) for _ in range(2)]
            for params, frame in zip((on_cpu, on_gpu), frames, strict=True):
                pack(message.copies, params, frame)
            assert torch.equal(*frames), f"sender {rank}, message {message.bucket} to {message.receiver}"
            infos = plan.receivers[message.receiver].params
            targets = [
                {
                    name: torch.zeros(info.shape, dtype=getattr(torch, info.dtype), device=device)
                    for name, info in infos.items()
                }
                for device in ("cpu", cuda)
            ]
            for target in targets:
                unpack(message.copies, frames[0], target)
            assert all(torch.equal(targets[0][name], targets[1][name].cpu()) for name in infos)
            messages += 1
    assert messages > 0
