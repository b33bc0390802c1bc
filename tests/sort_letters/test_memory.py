"""The memory measurement of a program, against programs that take a known amount."""

from __future__ import annotations

import subprocess
import sys

import pytest

MIB = 1024 * 1024
# A process with a child, which map the same 40 MiB of shared memory and have 20 MiB each of their own.
PROGRAM = """
import mmap, os, sys
shared = mmap.mmap(-1, 40 << 20)
shared.write(b"x" * (40 << 20))
child = os.fork()
for at in range(0, 40 << 20, 4096):
    shared[at]
own = bytearray(os.urandom(1) * (20 << 20))
os.write(1, b"ready\\n")
sys.stdin.read()
"""
# Bytes of the measuring process and of that program: before it, with it and after it.
WATCHING = """
import sys
from subprocess import PIPE, Popen
from examples.sort_letters.memory import MemoryWatch
watch = MemoryWatch()
sizes = [watch.now()]
with Popen([sys.executable, "-c", sys.argv[1]], env=watch.environment, stdin=PIPE, stdout=PIPE) as program:
    assert [program.stdout.readline() for _ in range(2)] == [b"ready\\n"] * 2
    sizes.append(watch.now())
    program.communicate()
print(*sizes, watch.now())
"""


@pytest.fixture
def baseline() -> int:
    """Bytes of a process that does nothing, twice."""
    return 2 * 15 * MIB


@pytest.mark.process
def test_shared_memory_is_counted_once(baseline: int) -> None:
    told = subprocess.check_output([sys.executable, "-c", WATCHING, PROGRAM], text=True, timeout=120)
    before, found, after = map(int, told.split())
    assert 80 * MIB <= found - before <= 80 * MIB + baseline
    assert after == pytest.approx(before, abs=5 * MIB)
