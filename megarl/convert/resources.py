"""The resources of a conversion: memory, and worker processes as far as memory allows."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from megarl.errors import RunError, UsageError
from megarl.files import format_bytes

_LATER_BYTES = 64 << 20
"""Memory of a process for code that it imports later, temporary values, and what the allocator keeps."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The resources of a conversion.

    Args:
        memory: resident bytes of all its processes together, without the page cache.
        processes: largest number of worker processes; with one, the work is done in this process.
    """

    memory: int = 16 << 30
    processes: int = 1

    def workers(self, tasks: Sequence[int]) -> int:
        """Returns the number of processes for tasks of these bytes; raises UsageError without memory for one."""
        base = resident_bytes() + _LATER_BYTES
        largest = max(tasks, default=0)
        if base + largest > self.memory:
            file = f"the largest output file and what is read for it {format_bytes(largest)}"
            raise UsageError(
                f"--memory-budget {format_bytes(self.memory)} is too small: Python and torch take "
                f"{format_bytes(base)}, {file}; give at least {format_bytes(1.01 * (base + largest))}"
            )
        fitting = (self.memory - base) // (base + largest)
        return max(1, min(self.processes, len(tasks), fitting))


DEFAULT = Resources()


def run_tasks[Task, Result](
    tasks: Sequence[Task], work: Callable[[Task], Result], workers: int
) -> Iterator[tuple[Task, Result]]:
    """Runs independent tasks, in this process if one works, and yields results as they come.

    Raises RunError where a worker was killed, or the first exception of a task; no task is started
    after it.
    """
    if workers == 1:
        for task in tasks:
            yield task, work(task)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker) as pool:
        futures = {pool.submit(work, task): task for task in tasks}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool:
            raise RunError("a worker process was killed; finished files are kept: run the command again") from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def resident_bytes() -> int:
    """Returns the physical memory of this process, shared libraries included."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _start_worker() -> None:
    """Gives a worker one thread, and ends it with its parent."""
    import torch

    torch.set_num_threads(1)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
