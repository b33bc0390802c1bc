"""Stacks of a run's processes, which each of them writes when a signal asks for them.

The handler needs neither the interpreter nor its lock, so that a process answers while it hangs in C++. It writes into
an anonymous file, whose name other processes of the machine find in /proc.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

_SIGNAL = signal.SIGUSR2
_PROC = Path("/proc")
_ANSWER_S, _QUIET_S = 5.0, 0.3
"""Wait for the stacks, and for more of them."""
_NATIVE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class ProcessStacks:
    """The stacks of a process.

    Args:
        name: that of the process's log.
        text: as faulthandler writes them, the innermost frame first; empty without an answer.
        silence: why there is no answer.
        native: stacks with C++ frames, if py-spy is installed.
    """

    name: str
    pid: int
    host: str
    text: str = ""
    silence: str = ""
    native: str = ""


def answer_signal(log_file: Path) -> int:
    """Makes this process answer from now on, under the name of its log; returns the descriptor of its answers."""
    descriptor = os.memfd_create(_prefix(log_file.parent) + log_file.stem)
    faulthandler.register(_SIGNAL, file=descriptor)
    return descriptor


def answer_as_child(part: str) -> None:
    """Makes a process answer that prints into the log of its parent; its name is the parent's and `part`."""
    log_file = Path(os.readlink("/proc/self/fd/2"))
    if log_file.suffix == ".log":
        answer_signal(log_file.with_stem(f"{log_file.stem}-{part}"))


@contextmanager
def answering(log_file: Path) -> Generator[None]:
    """Makes this process answer in the block."""
    descriptor = answer_signal(log_file)
    try:
        yield
    finally:
        faulthandler.unregister(_SIGNAL)
        os.close(descriptor)


def take_stacks(logs: Path) -> list[ProcessStacks]:
    """Returns the stacks of the processes of this machine whose logs are in a directory, ordered by name."""
    with ThreadPoolExecutor() as executor:
        return sorted(executor.map(lambda each: _ask(*each), _answering(logs)), key=lambda found: found.name)


def write_stacks(found: Sequence[ProcessStacks], logs: Path) -> Path:
    """Writes a file per process into a new directory below that of the logs, and returns it."""
    directory = logs / "stacks" / time.strftime("%Y-%m-%dT%H-%M-%S")
    directory.mkdir(parents=True, exist_ok=True)
    names = [each.name for each in found]
    for each in found:
        name = each.name if names.count(each.name) == 1 else f"{each.name}-{each.pid}"
        head = f"{each.name}, pid {each.pid} on {each.host}"
        parts = [part for part in (each.silence, each.text, each.native) if part]
        (directory / f"{name}.txt").write_text("\n\n".join([head, *parts]) + "\n", encoding="utf-8")
    return directory


def _prefix(logs: Path) -> str:
    """Returns the beginning of the names of the files of answers; a name has at most 249 bytes."""
    return f"megarl-stacks:{hashlib.sha256(os.path.realpath(logs).encode()).hexdigest()[:16]}:"


def _answering(logs: Path) -> list[tuple[str, int, Path]]:
    """Returns the name, the pid and the file of answers of each process."""
    beginning, end = f"/memfd:{_prefix(logs)}", " (deleted)"
    found: dict[int, tuple[str, Path]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has ended, or belongs to another user
                for file in (entry / "fd").iterdir():
                    if (link := os.readlink(file)).startswith(beginning):
                        name = link.removeprefix(beginning).removesuffix(end)
                        # A forked child also has the file of its parent, with a shorter name.
                        found[int(entry.name)] = max(found.get(int(entry.name), ("", file)), (name, file))
    return [(name, pid, file) for pid, (name, file) in found.items()]


def _ask(name: str, pid: int, answers: Path) -> ProcessStacks:
    found = ProcessStacks(name=name, pid=pid, host=socket.gethostname())
    try:
        if not int(_status(pid, "SigCgt"), 16) >> (_SIGNAL - 1) & 1:
            found = replace(found, silence="it has replaced the handler of SIGUSR2")
        elif text := "" if _is_stopped(pid) else _signalled(pid, answers):
            found = replace(found, text=text)
        elif _is_stopped(pid):
            found = replace(found, silence="it is stopped, by SIGSTOP or a debugger")
        else:
            state = _status(pid, "State")
            found = replace(found, silence=f"no stacks within {_ANSWER_S:g} s; its state is {state}")
    except OSError:
        return replace(found, silence="it has ended")
    return replace(found, native=_native(pid))


def _status(pid: int, field: str) -> str:
    """Returns a field of a process's status, see proc(5)."""
    lines = (line.split(":", 1) for line in (_PROC / str(pid) / "status").read_text().splitlines())
    return dict(lines)[field].strip()


def _is_stopped(pid: int) -> bool:
    return _status(pid, "State")[0] in "tT"


def _signalled(pid: int, answers: Path) -> str:
    """Signals a process, waits until the file of its answers no longer grows, and returns what is new."""
    before = answers.stat().st_size
    os.kill(pid, _SIGNAL)
    size, changed, deadline = before, time.monotonic(), time.monotonic() + _ANSWER_S
    while (now := time.monotonic()) < deadline and (size == before or now < changed + _QUIET_S):
        time.sleep(0.05)
        if (grown := answers.stat().st_size) > size:
            size, changed = grown, now
    with answers.open("rb") as file:
        file.seek(before)
        return file.read().decode(errors="replace")


def _native(pid: int) -> str:
    """Returns the stacks with C++ frames, or why there are none; empty without py-spy."""
    program = shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))
    if program is None:
        return ""
    command = [program, "dump", "--native", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_NATIVE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"py-spy: {error}"
    return done.stdout or f"py-spy: {done.stderr.strip()}"
