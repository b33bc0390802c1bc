"""Doing the parts of a conversion: in this process, or in several."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

import torch

from megarl.convert.memory import give_back_at_once

Item = TypeVar("Item")
Result = TypeVar("Result")


class WorkerError(RuntimeError):
    """A worker process ended before its work did."""


def run(items: Sequence[Item], work: Callable[[Item], Result], processes: int) -> Iterator[tuple[Item, Result]]:
    """Does some work on each item; gives the results as they come.

    Args:
        items: independent of one another.
        work: at the top of a module or a record of one, so that it can be pickled.
        processes: this one alone where it is 1; otherwise so many others.

    Raises:
        WorkerError: a worker was killed.
        Exception: the first that the work has raised; nothing new is begun after it.
    """
    if processes == 1 or len(items) < 2:
        give_back_at_once()
        for item in items:
            yield item, work(item)
        return
    context = multiprocessing.get_context("spawn")
    workers = min(processes, len(items))
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker) as pool:
        futures = {pool.submit(work, item): item for item in items}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool:
            raise WorkerError("a worker process was killed; what is written is kept: run the command again") from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
    """The processes divide the cores; none outlives the one that started it."""
    torch.set_num_threads(1)
    give_back_at_once()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
