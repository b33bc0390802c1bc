"""Resources of a conversion: memory, which bounds the blocks that are read at a time, and worker processes."""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megarl.errors import RunError, UsageError
from megarl.files import format_bytes

_BLOCK_BYTES = 64 << 20
_MIN_BLOCK_BYTES = 1 << 20
_M_MMAP_THRESHOLD = -3
"""Of glibc's malloc.h."""
_BUFFERS = 5
"""Memory of a process, in blocks: the block, the part that is read at a time, the copy that ``torch.save`` makes, and
as much again that the allocator keeps."""
_LATER_BYTES = 8 << 20
"""Memory of a process for code that it imports later."""
_TENSOR_PLAN_BYTES = 24 << 10
"""Of the plan, per tensor, in the first process. Boxes and plan of an import of Qwen3-235B, with 37 thousand tensors,
took 3 KiB at their peak; the rest is an allowance for records of files and tasks."""
_BLOCK_PLAN_BYTES = 5 << 10
"""Of the plan, per block."""
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_LINE_EVERY_S = 10.0


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


Task = TypeVar("Task", bound=_Sized)
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The resources of a conversion.

    Args:
        memory: resident bytes of all its processes together, without the page cache.
        processes: that read and write.
    """

    memory: int
    processes: int

    def block_bytes(self, tensors: int, nbytes: int) -> int:
        """Returns the largest block size, in bytes, that fits; ``nbytes``: of all tensors together.

        Smaller blocks take less memory, but their plan takes more.
        """
        workers = self.processes if self.processes > 1 else 0
        fixed = (resident_bytes() + _LATER_BYTES) * (1 + workers) + tensors * _TENSOR_PLAN_BYTES
        left = self.memory - fixed
        buffers = self.processes * _BUFFERS
        plans = nbytes * _BLOCK_PLAN_BYTES
        # The larger solution of: buffers * size + plans / size = left.
        square = left**2 - 4 * buffers * plans
        size = 0 if left < 0 or square < 0 else (left + math.isqrt(square)) // (2 * buffers)
        if size < _MIN_BLOCK_BYTES:
            best = max(_MIN_BLOCK_BYTES, math.isqrt(plans // buffers))
            least = fixed + buffers * best + plans // best
            raise UsageError(
                f"--memory-budget {format_bytes(self.memory)} is too little: Python, torch and the plan alone take "
                f"{format_bytes(fixed)} in {self.processes} process{'es' if workers else ''}; "
                f"give at least {format_bytes(least)}" + (", or fewer --processes" if workers else "")
            )
        return min(_BLOCK_BYTES, size)

    def run(
        self, title: str, tasks: Sequence[Task], work: Callable[[Task], Result], done_bytes: int = 0
    ) -> Iterator[tuple[Task, Result]]:
        """Runs independent tasks, shows their progress, and yields results as they come.

        Args:
            work: can be pickled; called in this process if it is the only one.
            done_bytes: of tasks that were done before.

        Raises:
            RunError: a worker was killed.
            Exception: the first that a task raises; no task is started after it.
        """
        with _progress(title, done_bytes + sum(task.nbytes for task in tasks), done_bytes) as advance:
            for task, result in self._results(tasks, work):
                yield task, result
                advance(task.nbytes)

    def _results(self, tasks: Sequence[Task], work: Callable[[Task], Result]) -> Iterator[tuple[Task, Result]]:
        if self.processes == 1 or len(tasks) < 2:
            _return_freed_memory()
            for task in tasks:
                yield task, work(task)
            return
        context = multiprocessing.get_context("spawn")
        workers = min(self.processes, len(tasks))
        with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker) as pool:
            futures = {pool.submit(work, task): task for task in tasks}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            except BrokenProcessPool:
                raise RunError("a worker process was killed; what is written is kept: run the command again") from None
            finally:
                pool.shutdown(wait=True, cancel_futures=True)


def parse_bytes(option: str, text: str) -> int:
    """Parses an option's size, such as ``512MiB``, ``4GiB`` or ``5GB``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)", text.strip())
    if match is None or match[2] not in _UNITS or float(match[1]) == 0:
        raise UsageError(f"{option} {text!r} is not a size; write one like 512MiB, 4GiB or 5GB")
    return int(float(match[1]) * _UNITS[match[2]])


def resident_bytes() -> int:
    """Returns the physical memory of this process, shared libraries included."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def _progress(title: str, total: int, done: int) -> Iterator[Callable[[int], None]]:
    """Shows progress on standard error, in a terminal or as a line every 10 s; yields a function that counts bytes."""
    console = Console(stderr=True, highlight=False)
    if done:
        console.print(f"{title}: {format_bytes(done)} are there already")
    if console.is_terminal:
        columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(TextColumn("[bold]{task.description}"), *columns, console=console) as bar:
            task = bar.add_task(title, total=total, completed=done)
            yield lambda nbytes: bar.advance(task, nbytes)
        return
    start = last_line = time.monotonic()
    skipped = done

    def advance(nbytes: int) -> None:
        nonlocal done, last_line
        done += nbytes
        if done == total or time.monotonic() - last_line >= _LINE_EVERY_S:
            last_line = time.monotonic()
            rate = format_bytes((done - skipped) / max(1e-3, last_line - start))
            of = f"{format_bytes(done)} of {format_bytes(total)} ({100 * done // max(1, total)}%)"
            console.print(f"{title}: {of}, {rate}/s")

    yield advance


def _return_freed_memory() -> None:
    """Makes glibc return the memory of blocks when they are freed.

    By default it keeps more of it with each large block (``M_MMAP_THRESHOLD`` in ``mallopt(3)``). One comparison, in
    several runs, grew by 16 to 95 MiB without this setting, and by 14 to 23 with it.
    """
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MIN_BLOCK_BYTES)


def _start_worker() -> None:
    """Gives a worker one thread, and ends it with its parent."""
    torch.set_num_threads(1)
    _return_freed_memory()
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
