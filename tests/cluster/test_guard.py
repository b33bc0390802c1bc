"""Everything that a guarded program started ends with it, however it ends; without Ray."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.cluster.cleanup import MARK, clean_up, marked_processes

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
MARKED = f"guarded-{secrets.token_hex(4)}"
AGENT = f"""
import os, subprocess, sys
from pathlib import Path
from megarl.cluster.cleanup import Guard
directory, keep, how = sys.argv[1:]
guard = Guard({MARKED!r}, directory, os.environ, Path(keep))
guard.remove(Path("the key"))
subprocess.Popen(["sleep", "600"], env={{**os.environ, {MARK!r}: {MARKED!r}}})
stubborn = '''
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("there", flush=True)
time.sleep(600)
'''
subprocess.Popen([sys.executable, "-P", "-c", stubborn], env={{**os.environ, {MARK!r}: {MARKED!r}}})
print(guard._process.pid, flush=True)
sys.stdin.readline()
sys.exit(not guard.finish(failed=not how.endswith("good")))
"""


@pytest.fixture
def ray(tmp_path: Path) -> Iterator[Path]:
    """A directory as Ray has it."""
    directory = Path(tempfile.mkdtemp(dir=tmp_path))
    (directory / "r" / "session_latest" / "logs").mkdir(parents=True)
    (directory / "r" / "session_latest" / "logs" / "raylet.out").write_text("it was like this")
    yield directory
    for pid in marked_processes(MARKED):
        os.kill(pid, signal.SIGKILL)


def test_temporary_files_are_removed_even_if_logs_cannot_be_kept(
    ray: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    clean_up(MARKED, str(ray), tmp_path / "file" / "kept")
    assert not ray.exists()
    assert "Ray's logs of this node are not kept in" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["good", "bad", "agent killed", "guard killed", "guard killed, good"])
def test_nothing_is_left(how: str, ray: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    (tmp_path / "signal.py").write_text("raise ImportError('a module of the user')")
    (tmp_path / "the key").touch()
    command = [sys.executable, "-P", "-c", AGENT, str(ray), str(kept), how]
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    agent = subprocess.Popen(command, cwd=tmp_path, env=path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert agent.stdin is not None
    assert agent.stdout is not None
    lines = sorted((agent.stdout.readline().strip(), agent.stdout.readline().strip()))
    guard = int(lines[0])
    assert len(marked_processes(MARKED)) == 2
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(guard, number)
    if how == "agent killed":
        agent.kill()
    elif how.startswith("guard killed"):
        os.kill(guard, signal.SIGKILL)
    agent.communicate("\n", timeout=60)
    deadline = time.monotonic() + 60
    while ray.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not ray.exists()
    assert marked_processes(MARKED) == []
    assert agent.returncode == (-signal.SIGKILL if how == "agent killed" else 0)
    assert how.startswith("guard killed") or not (tmp_path / "the key").exists()
    assert (kept / "raylet.out").exists() == (not how.endswith("good"))
