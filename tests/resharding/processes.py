"""Ranks that may die: processes forked from one that has imported everything, and what the survivors return."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def run(function: Callable[..., Any], *args: Any, world_size: int, timeout: float = 240.0) -> dict[int, Any]:
    """Calls ``function(rank, *args)`` in a process per rank.

    Returns:
        What the ranks returned that have not been killed.

    Raises:
        AssertionError: a rank raised, or did not finish in time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.resharding.jobs"])
    processes, pipes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_call, args=(theirs, function, rank, args), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    deadline = time.monotonic() + timeout
    returned: dict[int, Any] = {}
    try:
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(max(0.0, deadline - time.monotonic())), f"rank {rank} has not finished in {timeout:g} s"
            try:
                good, value = pipe.recv()
            except EOFError:
                continue
            assert good, f"rank {rank} failed:\n{value}"
            returned[rank] = value
    finally:
        for process in processes:
            process.kill()
            process.join()
    return returned


def _call(pipe: Connection, function: Callable[..., Any], rank: int, args: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        pipe.send((True, function(rank, *args)))
    except BaseException:  # a process boundary: the test must see whatever it was
        pipe.send((False, traceback.format_exc()))
