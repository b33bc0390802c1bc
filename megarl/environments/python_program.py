"""Python programs that a model writes, under limits, and in a sandbox of bubblewrap unless that is declined."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Final, Literal

from megarl.files import format_bytes, remove_tree
from megarl.rewards.child_process import how_ended

Sandbox = Literal["bubblewrap", "none"]

FIX: Final = (
    "install bubblewrap 0.8 or later (apt-get install bubblewrap) and let it make namespaces (docs/security.md), "
    "or set environment.args.sandbox=none, with which programs can do whatever you can"
)
"""Fix for an environment whose programs cannot run in bubblewrap."""

_SECONDS = 10
_MEMORY = 1 << 30
"""Bytes of each process, and of all together."""
_OUTPUT = 16 << 20
_FILES = 64 << 20
"""Bytes of all files of a program, and of each."""
_PROCESSES = 64
"""Processes and threads of a program."""
_SHOWN = 4000
"""Characters of a program's output; of a longer one the start and the end are shown."""
_LOOK_S = 0.05
"""Time between looks at what a program uses."""
_LIMITS: Final = {
    resource.RLIMIT_CPU: _SECONDS,
    resource.RLIMIT_AS: _MEMORY,
    resource.RLIMIT_FSIZE: _FILES,
    resource.RLIMIT_NOFILE: 64,
    resource.RLIMIT_CORE: 0,
}
"""Limits of each process."""

_PROGRAM = """
import resource, sys
for limit, most in {limits}.items():
    resource.setrlimit(limit, (most, most))
exec(compile(sys.stdin.read(), "program.py", "exec"), {{"__name__": "__main__"}})
"""
_HOME = "/tmp/program"
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/proc/cpuinfo")
"""What a program can read, besides Python's own directories."""
_IN_USER_NAMESPACE = ("--unshare-all", "--unshare-user", "--disable-userns")
_AS_ROOT = ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try")
"""Namespaces in a container whose root has CAP_SYS_ADMIN, and which forbids user namespaces."""


def run_program(code: str, sandbox: Sandbox) -> str:
    """Returns what a program prints; a RuntimeError, with the cause and what it printed, if it fails or is ended."""
    if sandbox == "bubblewrap":
        problem, printed = _run(code, bubblewrap(), "/", _HOME)
    else:
        directory = tempfile.mkdtemp()
        try:
            problem, printed = _run(code, (), directory, directory)
        finally:
            remove_tree(directory)
    if problem:
        raise RuntimeError(f"{problem}\n{printed}".strip())
    return printed


@cache
def bubblewrap() -> Sequence[str]:
    """Returns the command that runs another one in a sandbox, once that has been tried.

    The other command has separate namespaces for processes, network, IPC and mounts. It sees the
    programs of the system and Python's directories, read-only, and two empty file systems in
    memory, and begins in one. Raises ValueError where bubblewrap is missing, or cannot run.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise ValueError("bubblewrap is missing: there is no program bwrap")
    size = str(_FILES)
    mounts = ["--dev", "/dev", "--size", size, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    mounts += ["--size", size, "--tmpfs", "/tmp", "--dir", _HOME]
    for path in dict.fromkeys((*_SYSTEM, sys.base_prefix, sys.prefix)):
        mounts += ["--ro-bind-try", path, path]
    mounts += ["--remount-ro", "/"]
    problems: list[str] = []
    ways: list[Sequence[str]] = [_IN_USER_NAMESPACE]
    if os.geteuid() == 0:
        ways.append(_AS_ROOT)
    for namespaces in ways:
        alone = ("--cap-drop", "ALL", "--die-with-parent", "--new-session")
        command = (program, *namespaces, *alone, *mounts, "--chdir", _HOME, "--")
        problem, printed = _run("", command, "/", _HOME)
        if not problem:
            return command
        problems.append(printed.removeprefix("bwrap: ") or problem)
    raise ValueError(f"bubblewrap cannot run here: {'; '.join(problems)}")


def _run(code: str, sandbox: Sequence[str], directory: str, home: str) -> tuple[str, str]:
    """Runs a program in a directory; returns its problem, "" for none, and what it printed."""
    with tempfile.TemporaryFile() as program, tempfile.TemporaryFile() as output:
        program.write(code.encode(errors="replace"))
        program.seek(0)
        process = subprocess.Popen(
            [*sandbox, sys.executable, "-I", "-c", _PROGRAM.format(limits=_LIMITS)],
            stdin=program,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env={"PATH": os.defpath, "HOME": home, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            problem = _watched(process, output)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # it has not been waited for: the id is still its own
            status = process.wait()
        if not problem and status:
            problem = how_ended(status)
        output.seek(0)
        return problem, _shortened(output.read(_OUTPUT).decode(errors="replace").strip())


def _watched(process: subprocess.Popen[bytes], output: IO[bytes]) -> str:
    """Waits for the end of a program, without reaping it, or until it is past a limit; returns which one, or ""."""
    start = time.monotonic()
    while True:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        if os.fstat(output.fileno()).st_size > _OUTPUT:
            return f"the program was ended: it printed more than {format_bytes(_OUTPUT)}"
        if ended:
            return ""
        memory, threads = _used(process.pid)
        if memory > _MEMORY:
            return f"the program was ended: its processes took more than {format_bytes(_MEMORY)} of memory"
        if threads > _PROCESSES:
            return f"the program was ended: it had more than {_PROCESSES} processes and threads"
        elapsed = time.monotonic() - start
        if elapsed > _SECONDS:
            return f"the program was ended: it took longer than {_SECONDS} s"
        time.sleep(min(0.001 + elapsed / 10, _LOOK_S))


def _used(pid: int) -> tuple[int, int]:
    """Returns the resident bytes and the threads of a process and its descendants."""
    pages = threads = 0
    for process in _tree(pid):
        try:
            pages += int((process / "statm").read_text().split()[1])
            threads += len(os.listdir(process / "task"))
        except OSError:  # it has ended
            continue
    return pages * resource.getpagesize(), threads


def _tree(pid: int) -> Iterator[Path]:
    """Yields the directories in /proc of a process and its descendants."""
    process = Path(f"/proc/{pid}")
    yield process
    for thread in process.glob("task/*/children"):
        try:
            children = thread.read_text().split()
        except OSError:
            continue
        for child in children:
            yield from _tree(int(child))


def _shortened(text: str) -> str:
    left_out = len(text) - _SHOWN
    if left_out <= 0:
        return text
    half = _SHOWN // 2
    note = f"... {left_out} characters are left out: more than {_SHOWN} are not shown ..."
    return f"{text[:half]}\n{note}\n{text[-half:]}"


def python(code: str) -> str:
    """Runs a Python program in a new process, and returns what it prints.

    Args:
        code: the whole program; it must print its results. It has ten seconds, 1 GiB of memory and
            no network.
    """
    return run_program(code, "bubblewrap")


def python_without_sandbox(code: str) -> str:
    """Runs a Python program in a new process, and returns what it prints.

    Args:
        code: the whole program; it must print its results. It has ten seconds and 1 GiB of memory.
    """
    return run_program(code, "none")
