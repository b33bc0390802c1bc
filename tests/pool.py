"""A warm pool of rank processes: torch and megatron-core are imported once, and every test gets a fresh world."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from typing import Any

from megarl.garbage_collection import importing
from tests.leftovers import track_own_resources

DIED = (False, "its process died")

_IMPORTS_S = 600.0
"""How long processes may take to import torch and megatron-core, which does not count for any test."""

_held: deque[socket.socket] = deque(maxlen=8)

Job = tuple[Callable[..., Any], int, str | None, tuple[Any, ...]]


class RankPool:
    """Up to ``size`` processes that run functions as ranks of a ``torch.distributed`` world.

    A failure on one rank leaves the others in a collective that never ends, so the processes are replaced after it.

    Args:
        size: of the largest world.
        device: "cpu", or "cuda".
        gpus: number of GPUs, of which each process sees one, in turn.
    """

    def __init__(self, size: int, device: str = "cpu", gpus: int = 1) -> None:
        self._size, self._device = size, device
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self._gpus = visible.split(",")[:gpus] if visible else [str(gpu) for gpu in range(gpus)]
        self._context = multiprocessing.get_context("spawn")
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int,
        connected: bool = True,
        timeout: float = 120.0,
        dying: Collection[int] = (),
    ) -> list[Any]:
        """Calls ``function(rank, *args)`` on ranks 0 to ``world_size - 1`` of a new world.

        Args:
            function: at the top of a module, so that it can be pickled.
            connected: False leaves it to the function to make its world.
            timeout: seconds for all ranks.
            dying: ranks whose processes are to die.

        Returns:
            What each rank returned; None of one that died.

        Raises:
            AssertionError: a rank failed (its traceback is the message) or did not finish in time.
        """
        assert world_size <= self._size
        if not self._processes:
            self._start()
        init_method = f"tcp://127.0.0.1:{free_port()}" if connected else None
        for pipe in self._pipes[:world_size]:
            pipe.send((function, world_size, init_method, args))
        try:
            return self._results(world_size, timeout, dying)
        except BaseException:
            self.close()  # whoever is still at work would answer the next test
            raise

    def _results(self, world_size: int, timeout: float, dying: Collection[int]) -> list[Any]:
        results: list[Any] = [None] * world_size
        waiting, deadline = set(range(world_size)), time.monotonic() + timeout
        while waiting:
            ready = multiprocessing.connection.wait(
                [self._pipes[rank] for rank in waiting], timeout=max(0.0, deadline - time.monotonic())
            )
            if not ready:
                raise AssertionError(f"ranks {sorted(waiting)} of {world_size} did not finish within {timeout:.0f} s")
            for rank in [r for r in waiting if self._pipes[r] in ready]:
                ok, results[rank] = self._receive(rank)
                if rank in dying:
                    assert (ok, results[rank]) == DIED, f"rank {rank} lives: {results[rank]}"
                    results[rank] = None
                elif not ok:
                    raise AssertionError(f"rank {rank} of {world_size} failed:\n{results[rank]}")
                waiting.remove(rank)
        if dying:
            self.close()
        return results

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            return self._pipes[rank].recv()
        except EOFError:
            return DIED

    def _start(self) -> None:
        for rank in range(self._size):
            ours, theirs = self._context.Pipe()
            gpu = self._gpus[rank % len(self._gpus)]
            process = self._context.Process(target=_serve, args=(rank, self._device, gpu, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(_IMPORTS_S) or self._receive(rank) == DIED:
                self.close()
                raise AssertionError(f"rank {rank} of the pool did not start")

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


def free_port() -> int:
    """A TCP port at which a rank may listen; nobody else is given one of the latest few."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # which lets torch's own socket bind it too
    holder.bind(("", 0))  # as torch does
    _held.append(holder)
    return holder.getsockname()[1]


def _serve(rank: int, device: str, gpu: str, pipe: Connection) -> None:
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TORCH_COMPILE_DISABLE="1")
    if device == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    else:
        os.environ["TRITON_INTERPRET"] = "1"
    track_own_resources()
    with importing():
        import torch

        from megarl.megatron.platform import start_platform

        torch.set_num_threads(1)
        platform = start_platform(device)
    pipe.send("started")
    while True:
        try:
            job: Job = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, _run(rank, platform, job)))
        except BaseException:  # a process boundary: the test must see whatever it was
            pipe.send((False, traceback.format_exc()))


def _run(rank: int, platform: Any, job: Job) -> Any:
    import torch.distributed as dist
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

    from megarl.megatron.platform import start_world

    function, world_size, init_method, args = job
    if init_method is not None:
        start_world(platform, rank=rank, world_size=world_size, init_method=init_method, timeout_seconds=100)
    try:
        return function(rank, *args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
            embedding.forward.cache_clear()  # it keeps the embeddings, which have groups
        for dispatcher in [some for some in gc.get_objects() if issubclass(type(some), MoETokenDispatcher)]:
            vars(dispatcher).clear()  # it keeps a graph, whose hooks keep the model: a cycle through C++
        gc.collect()  # groups in reference cycles: each has threads that poll
