"""Stacks of a run's processes, which each of them writes when a signal asks for them, and what they wait for.

The handler needs neither the interpreter nor its lock, so that a process answers while it hangs in C++. It writes into
an anonymous file, whose name other processes of the machine find in /proc. A thread of the interpreter writes what the
process waits for into a second one, when another process has emptied it.
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
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

IN_COLLECTIVE = "; in "
"""Before the collectives in progress, in a line of what a rank waits for; it begins with the group and a colon."""
_SIGNAL = signal.SIGUSR2
_PROC = Path("/proc")
_ANSWER_S = 5.0
_QUIET_S = 0.3
"""Wait for the stacks, and for more of them."""
_NATIVE_S = 30.0
_STACKS = "megarl-stacks"
_WAITS = "megarl-waits"
_LOOK_S = 0.25
"""Between looks at whether one asks what a process waits for."""
_END = "\0"


@dataclass(frozen=True, kw_only=True)
class ProcessStacks:
    """The stacks of a process.

    Args:
        name: that of the process's log.
        text: as faulthandler writes them, the innermost frame first; empty without an answer.
        silence: why there is no answer.
        waits: lines that say what it waits for, of the driver and of ranks.
        native: stacks with C++ frames, if py-spy is installed.
    """

    name: str
    pid: int
    host: str
    text: str = ""
    silence: str = ""
    waits: tuple[str, ...] = ()
    native: str = ""


def answer_signal(log_file: Path) -> int:
    """Makes this process answer from now on, under the name of its log; returns the descriptor of its answers."""
    descriptor = _answers(_STACKS, log_file)
    faulthandler.register(_SIGNAL, file=descriptor)
    return descriptor


def answer_as_child(part: str) -> None:
    """Makes a process answer that prints into the log of its parent; its name is the parent's and `part`."""
    if (log_file := _own_log()) is not None:
        answer_signal(log_file.with_stem(f"{log_file.stem}-{part}"))


def tell_waits(waits: Callable[[], Sequence[str]]) -> None:
    """Makes this process, if it prints into a log, also tell what it waits for, whenever it is asked from now on."""
    if (log_file := _own_log()) is not None:
        _start_telling(log_file, waits, threading.Event())


@contextmanager
def answering(log_file: Path, waits: Callable[[], Sequence[str]]) -> Generator[None]:
    """Makes this process answer in the block, and tell what it waits for; afterwards as in a block around this one."""
    outer = [int(file.name) for _, file in _files("self", f"{_STACKS}:")]
    descriptor = answer_signal(log_file)
    ended = threading.Event()
    thread = _start_telling(log_file, waits, ended)
    try:
        yield
    finally:
        ended.set()
        thread.join()
        faulthandler.unregister(_SIGNAL)
        os.close(descriptor)
        if outer:
            faulthandler.register(_SIGNAL, file=max(outer))


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
        parts = [part for part in (each.silence, "\n".join(each.waits), each.text, each.native) if part]
        (directory / f"{name}.txt").write_text("\n\n".join([head, *parts]) + "\n", encoding="utf-8")
    return directory


def _own_log() -> Path | None:
    """Returns the log that this process prints into."""
    log_file = Path(os.readlink("/proc/self/fd/2"))
    return log_file if log_file.suffix == ".log" else None


def _answers(kind: str, log_file: Path) -> int:
    """Makes a file of answers, and returns its descriptor."""
    return os.memfd_create(_prefix(kind, log_file.parent) + log_file.stem)


def _prefix(kind: str, logs: Path) -> str:
    """Returns the beginning of the names of the files of answers; a name has at most 249 bytes."""
    return f"{kind}:{hashlib.sha256(os.path.realpath(logs).encode()).hexdigest()[:16]}:"


def _files(pid: int | str, prefix: str) -> list[tuple[str, Path]]:
    """Returns the rest of the names of a process's files of answers, and the files; OSError if it has ended."""
    found: list[tuple[str, Path]] = []
    for file in (_PROC / str(pid) / "fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile, as that of the listing
            link = os.readlink(file)
            if link.startswith(f"/memfd:{prefix}"):
                found.append((link.removeprefix(f"/memfd:{prefix}").removesuffix(" (deleted)"), file))
    return found


def _answering(logs: Path) -> list[tuple[str, int, Path, Path | None]]:
    """Returns of each process the name, the pid, and its files of answers: its stacks, and what it waits for."""
    found: list[tuple[str, int, Path, Path | None]] = []
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has ended, or belongs to another user
                if stacks := _files(entry.name, _prefix(_STACKS, logs)):
                    name, file = max(stacks)  # a forked child also has the file of its parent, with a shorter name
                    waits = dict(_files(entry.name, _prefix(_WAITS, logs)))
                    found.append((name, int(entry.name), file, waits.get(name)))
    return found


def _stacks_of(pid: int, answers: Path) -> str:
    """Returns the stacks of this process, or those that another one writes; nothing of a stopped one."""
    if pid == os.getpid():
        return _own()
    return "" if _is_stopped(pid) else _signalled(pid, answers)


def _ask(name: str, pid: int, answers: Path, waits: Path | None) -> ProcessStacks:
    found = ProcessStacks(name=name, pid=pid, host=socket.gethostname())
    try:
        if not int(_status(pid, "SigCgt"), 16) >> (_SIGNAL - 1) & 1:
            found = replace(found, silence="it has replaced the handler of SIGUSR2")
        elif text := _stacks_of(pid, answers):
            found = replace(found, text=text, waits=() if waits is None else _told(waits))
        elif _is_stopped(pid):
            found = replace(found, silence="it is stopped, by SIGSTOP or a debugger")
        else:
            state = _status(pid, "State")
            found = replace(found, silence=f"no stacks within {_ANSWER_S:g} s; its state is {state}")
    except OSError:
        return replace(found, silence="it has ended")
    return replace(found, native=_native(pid))


def _start_telling(log_file: Path, waits: Callable[[], Sequence[str]], ended: threading.Event) -> threading.Thread:
    """Starts a thread that writes what this process waits for, each time when the file of these answers is empty."""
    descriptor = _answers(_WAITS, log_file)
    os.write(descriptor, _END.encode())

    def tell() -> None:
        with open(descriptor, "r+b", buffering=0) as file:
            while not ended.wait(_LOOK_S):
                if os.fstat(descriptor).st_size:
                    continue
                try:
                    lines = waits()
                except RuntimeError:  # what is told changed meanwhile; it looks again
                    continue
                except Exception as error:
                    lines = [f"what it waits for cannot be told: {error!r}"]
                file.seek(0)
                file.write("\n".join([*lines, _END]).encode())

    thread = threading.Thread(target=tell, name="waits", daemon=True)
    thread.start()
    return thread


def _told(waits: Path) -> tuple[str, ...]:
    """Asks a process what it waits for; empty if its interpreter is locked."""
    os.truncate(waits, 0)
    text = ""
    deadline = time.monotonic() + _ANSWER_S
    while not text.endswith(_END) and time.monotonic() < deadline:
        time.sleep(0.05)
        text = waits.read_text(encoding="utf-8", errors="replace")
    return tuple(text.splitlines()[:-1])


def _status(pid: int, field: str) -> str:
    """Returns a field of a process's status, see proc(5)."""
    lines = (line.split(":", 1) for line in (_PROC / str(pid) / "status").read_text().splitlines())
    return dict(lines)[field].strip()


def _is_stopped(pid: int) -> bool:
    return _status(pid, "State")[0] in "tT"


def _own() -> str:
    """Returns the stacks of this process, without the signal: its handler may read threads that are ending."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read().decode(errors="replace")


def _signalled(pid: int, answers: Path) -> str:
    """Signals a process, waits until the file of its answers no longer grows, and returns what is new."""
    before = answers.stat().st_size
    os.kill(pid, _SIGNAL)
    size = before
    changed = time.monotonic()
    deadline = time.monotonic() + _ANSWER_S
    while (now := time.monotonic()) < deadline and (size == before or now < changed + _QUIET_S):
        time.sleep(0.05)
        if (grown := answers.stat().st_size) > size:
            size = grown
            changed = now
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
