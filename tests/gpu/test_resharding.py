"""Copies of a sync between CUDA parameters and buffers, against the CPU's; memory of other processes."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch

from megarl.resharding.buckets import (
    Checksum,
    bucket_views,
    pack,
    payload,
    recv_buffer_bytes,
    recv_views,
    row_sums,
    unpack,
)
from megarl.resharding.spec import plan_recv_buffers
from megarl.resharding.sync_barrier import SyncStats
from megarl.resharding.transfers.cuda import DeviceMapping, DeviceRecvBuffer
from megarl.weights.planner import Place
from tests.resharding import jobs
from tests.resharding.ways import check_colocated

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_copies_and_checksums_equal_the_cpus(cuda: str, dtype: str) -> None:
    plan = jobs.transfer_plan(dtype=dtype)
    recv_buffers = plan_recv_buffers(plan, [Place(node=0)] * jobs.RANKS, device="cpu", transport="auto")
    messages = 0
    for rank, sender in plan.senders.items():
        on_cpu = jobs.weights(jobs.trainer_map(rank))
        on_gpu = {name: tensor.to(cuda) for name, tensor in on_cpu.items()}
        for message in sender.messages:
            buffer = recv_buffers[message.receiver]
            memories: list[torch.Tensor] = []
            for params, device in ((on_cpu, "cpu"), (on_gpu, cuda)):
                frame = torch.zeros(message.nbytes, dtype=torch.uint8, device=device)
                memory = torch.zeros(recv_buffer_bytes(buffer), dtype=torch.uint8, device=device)
                targets = recv_views(
                    message, buffer.buckets[message.bucket], bucket_views(memory, buffer, message.bucket)
                )
                sums: set[int] = set()
                for places in (payload(message, frame), targets):
                    checksum = Checksum(message, SyncStats(version=1))
                    pack(message, params, places, checksum)
                    sums.add(checksum.value)
                assert len(sums) == 1, f"sender {rank}, message {message.bucket} to {message.receiver}"
                assert torch.equal(row_sums(memory).cpu(), row_sums(memory.cpu()))
                memories += [frame.cpu(), memory.cpu()]
                memory.zero_()
                unpack(message, frame, targets)
                memories.append(memory.cpu())
            assert all(torch.equal(a, b) for a, b in zip(memories[:3], memories[3:], strict=True))
            messages += 1
    assert messages > 0


def _double(handles: list[str], pipe: Connection) -> None:
    """Another process on the device, as a trainer is to an engine."""
    mappings = [DeviceMapping(handle, torch.device("cuda")) for handle in handles]
    for mapping in mappings:
        mapping.memory.mul_(2)
    torch.cuda.synchronize()
    for mapping in mappings:
        mapping.close()
    pipe.send("done")


def test_another_process_writes_to_receive_buffers(cuda: str) -> None:
    """The driver allocates small memory in blocks; a process that maps two buffers needs two blocks."""
    sizes = (1 << 10, 1 << 10, 3 << 20)
    buffers = [DeviceRecvBuffer(nbytes, torch.device(cuda, 0)) for nbytes in sizes]
    for value, buffer in enumerate(buffers, 21):
        buffer.memory.fill_(value)
    torch.cuda.synchronize()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_double, args=([buffer.handle for buffer in buffers], theirs))
    process.start()
    assert ours.poll(60), "the other process has not answered"
    process.join()
    for value, (buffer, nbytes) in enumerate(zip(buffers, sizes, strict=True), 21):
        assert bool((buffer.memory == 2 * value).all())
        assert buffer.memory.numel() == nbytes
        buffer.release()


def test_a_sync_of_one_trainer_and_one_engine_on_one_gpu(cuda: str) -> None:
    check_colocated(cuda)
