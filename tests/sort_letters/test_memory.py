"""The memory measurement of a program, against programs that take a known amount."""

from __future__ import annotations

import subprocess
import sys
from threading import Event

import pytest

from examples.sort_letters.memory import MemoryWatch

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


def test_the_peak_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, looked_at_all = [3, 7, 1], Event()

    def now(_watch: MemoryWatch) -> int:
        if len(sizes) == 1:
            looked_at_all.set()
            return sizes[0]
        return sizes.pop(0)

    monkeypatch.setattr("examples.sort_letters.memory._INTERVAL_S", 0.01)
    monkeypatch.setattr(MemoryWatch, "now", now)
    with MemoryWatch() as watch:
        assert looked_at_all.wait(timeout=60)
    assert watch.peak_bytes == 7
