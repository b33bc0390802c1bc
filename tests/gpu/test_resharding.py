"""What a sync moves between CUDA parameters and memory, against the same on the CPU; memory of other processes."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch

from megarl.resharding.buckets import Checksum, bucket_views, pack, payload, recv_buffer_bytes, recv_views, unpack
from megarl.resharding.memory import DeviceRecvBuffer, PeerMappings
from megarl.resharding.sync_barrier import SyncStats
from tests.resharding import jobs
from tests.resharding.ways import Connections

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_copies_and_checksums_are_those_of_the_cpu(cuda: str, dtype: str) -> None:
    plan = jobs.transfer_plan(dtype=dtype)
    recv_buffers = Connections()(plan).recv_buffers
    messages = 0
    for rank, sender in plan.senders.items():
        on_cpu = jobs.weights(jobs.trainer_map(rank))
        on_gpu = {name: tensor.to(cuda) for name, tensor in on_cpu.items()}
        for message in sender.messages:
            buffer = recv_buffers[message.receiver]
            sums, memories = [], []
            for params, device in ((on_cpu, "cpu"), (on_gpu, cuda)):
                frame = torch.zeros(message.nbytes, dtype=torch.uint8, device=device)
                memory = torch.zeros(recv_buffer_bytes(buffer), dtype=torch.uint8, device=device)
                targets = recv_views(
                    message, buffer.buckets[message.bucket], bucket_views(memory, buffer, message.bucket)
                )
                for places in (payload(message, frame), targets):
                    checksum = Checksum(message, SyncStats(version=1))
                    pack(message, params, places, checksum)
                    sums.append(checksum.value)
                memories += [frame.cpu(), memory.cpu()]
                memory.zero_()
                unpack(message, frame, targets)
                memories.append(memory.cpu())
            assert len(set(sums)) == 1, f"sender {rank}, message {message.bucket} to {message.receiver}"
            assert all(torch.equal(a, b) for a, b in zip(memories[:3], memories[3:], strict=True))
            messages += 1
    assert messages > 0


def _double(handle: str, pipe: Connection) -> None:
    """Another process on the device, as a trainer is to an engine."""
    mappings = PeerMappings(torch.device("cuda"))
    mappings.open(0, handle)
    mappings[0].mul_(2)
    torch.cuda.synchronize()
    mappings.end_sync()
    pipe.send("done")


def test_another_process_writes_to_a_receive_buffer(cuda: str) -> None:
    buffer = DeviceRecvBuffer(1 << 20, torch.device(cuda, 0))
    buffer.memory.fill_(21)
    torch.cuda.synchronize()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_double, args=(buffer.handle, theirs))
    process.start()
    assert ours.poll(60), "the other process has not answered"
    process.join()
    assert bool((buffer.memory == 42).all())
    buffer.release()
    assert buffer.memory.numel() == 0
    buffer.prepare()
    assert buffer.memory.numel() == 1 << 20
    buffer.release()


def test_a_sync_of_one_trainer_and_one_engine_on_one_gpu(cuda: str) -> None:
    """The trainer's process owns the receive buffer, and the engine maps it."""
    plan = jobs.single_plan()
    spec = Connections().colocated(plan)
    with multiprocessing.get_context("spawn").Pool(2) as processes:
        results = processes.starmap(jobs.colocated, [(rank, spec, cuda) for rank in range(2)], chunksize=1)
    (sent, _), (received, loaded) = results
    assert sent.nbytes == received.nbytes == plan.receivers[1].nbytes
    for name, tensor in jobs.weights(jobs.single_map()).items():
        assert torch.equal(loaded[name], tensor), name
