"""The memory of a conversion: how large the blocks may be that are read at a time."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import re
import sys
from dataclasses import dataclass

from megarl.convert.errors import UsageError

_BLOCK_BYTES = 64 << 20
_LEAST_BLOCK_BYTES = 1 << 20
_M_MMAP_THRESHOLD = -3
"""Of glibc's malloc.h."""
_BUFFERS = 5
"""Blocks' worth of memory that a process takes: the block, what is read of it at a time, the copy that ``torch.save``
writes from, and as much again that the allocator keeps."""
_LATER_BYTES = 8 << 20
"""What a process takes for code that is loaded when it runs."""
_PLAN_BYTES = 24 << 10
"""Per tensor, of the plan in the first process: which box goes where. An allowance: boxes and plan of an import of
Qwen3-235B, with 37 thousand tensors, came to 3 KiB at their peak; records of files and parts were not measured."""
_BLOCK_PLAN_BYTES = 5 << 10
"""Per block, of the same plan."""
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_bytes(option: str, text: str) -> int:
    """A size such as ``512MiB``, ``4GiB`` or ``5GB``.

    Args:
        option: that the text is given for.

    Raises:
        UsageError: it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)", text.strip())
    if match is None or match[2] not in _UNITS or float(match[1]) == 0:
        raise UsageError(f"{option} {text!r} is not a size; write one like 512MiB, 4GiB or 5GB")
    return int(float(match[1]) * _UNITS[match[2]])


def shown_bytes(nbytes: float) -> str:
    """A size for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a conversion may use.

    Args:
        memory: resident bytes of all its processes together; the page cache, which the system takes back, aside.
        processes: that read and write.
    """

    memory: int
    processes: int

    def block_bytes(self, tensors: int, nbytes: int) -> int:
        """The largest block that keeps the memory; smaller ones take less themselves, and more for the plan of them.

        Args:
            tensors: number of tensors to convert.
            nbytes: of them.

        Raises:
            UsageError: there is too little memory for anything.
        """
        others = self.processes if self.processes > 1 else 0
        fixed = (resident_bytes() + _LATER_BYTES) * (1 + others) + tensors * _PLAN_BYTES
        left, buffers, plans = self.memory - fixed, self.processes * _BUFFERS, nbytes * _BLOCK_PLAN_BYTES
        # buffers * share + plans / share = left, solved for the larger share
        square = left**2 - 4 * buffers * plans
        share = 0 if left < 0 or square < 0 else (left + math.isqrt(square)) // (2 * buffers)
        if share < _LEAST_BLOCK_BYTES:
            thrifty = max(_LEAST_BLOCK_BYTES, math.isqrt(plans // buffers))
            least = fixed + buffers * thrifty + plans // thrifty
            raise UsageError(
                f"--memory-budget {shown_bytes(self.memory)} is too little: Python, torch and the plan alone take "
                f"{shown_bytes(fixed)} in {self.processes} process{'es' if others else ''}; "
                f"give at least {shown_bytes(least)}" + (", or fewer --processes" if others else "")
            )
        return min(_BLOCK_BYTES, share)


def give_back_at_once() -> None:
    """Has the C library return the memory of blocks when they are freed.

    glibc keeps what it has, more of it with each large block (``M_MMAP_THRESHOLD`` in ``mallopt(3)``). Measured on the
    same comparison, beyond what it started with: 53 to 95 MiB in some runs and 16 to 23 in others; with this, 14 to 23.
    """
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LEAST_BLOCK_BYTES)


def resident_bytes() -> int:
    """Physical memory of this process now, shared libraries included."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
