"""Stacks of a run's processes, which each of them writes when a signal asks for them, and what they wait for.

The handler needs neither the interpreter nor its lock, so that a process answers while it hangs in
C++. It writes into an anonymous file, whose name other processes of the machine find in /proc. A
thread of the interpreter writes what the process waits for into a second one, when another process
has emptied it.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

IN_COLLECTIVE = "; in "
"""Separator before the collectives in progress, in a line that begins with the group and a colon."""
_SIGNAL = signal.SIGUSR2
_PROC = Path("/proc")
_ANSWER_S = 5.0
_QUIET_S = 0.3
"""Wait for the stacks, and for more of them."""
_STACKS = "megarl-stacks"
_WAITS = "megarl-waits"
_LOOK_S = 0.25
"""Between looks at whether another process has emptied the file."""
_END = "\0"


@dataclass(frozen=True, kw_only=True)
class ProcessStacks:
    """The stacks of a process.

    Args:
        name: name of the process's log.
        text: stacks as faulthandler writes them, the innermost frame first; empty
            without an answer.
        silence: reason why there is no answer.
        waits: lines that say what the driver or a rank waits for.
    """

    name: str
    pid: int
    host: str
    text: str = ""
    silence: str = ""
    waits: tuple[str, ...] = ()


def answer_signal(log_file: Path) -> int:
    """Makes this process answer from now on, under the name of its log; returns the descriptor of its answers."""
    descriptor = _make_answers(_STACKS, log_file)
    faulthandler.register(_SIGNAL, file=descriptor)
    return descriptor


def answer_as_child(part: str) -> None:
    """Makes a process answer that prints into the log of its parent; its name is the parent's and `part`."""
    log_file = _log_of_this_process()
    if log_file is not None:
        answer_signal(log_file.with_stem(f"{log_file.stem}-{part}"))


def tell_waits(waits: Callable[[], Sequence[str]]) -> None:
    """Makes this process, if it prints into a log, also answer what it waits for from now on."""
    log_file = _log_of_this_process()
    if log_file is not None:
        _start_telling(log_file, waits, threading.Event())


@contextmanager
def answering(log_file: Path, waits: Callable[[], Sequence[str]]) -> Generator[None]:
    """Makes this process answer in the block, also what it waits for; afterwards as in a block around this one."""
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
    pids = [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]
    with ThreadPoolExecutor() as executor:
        found = executor.map(partial(_take, logs=logs), pids)
        return sorted(filter(None, found), key=lambda stacks: stacks.name)


def write_stacks(found: Sequence[ProcessStacks], logs: Path) -> Path:
    """Writes a file per process into a new directory below that of the logs, and returns it."""
    directory = logs / "stacks" / time.strftime("%Y-%m-%dT%H-%M-%S")
    directory.mkdir(parents=True, exist_ok=True)
    names = [each.name for each in found]
    for each in found:
        name = each.name if names.count(each.name) == 1 else f"{each.name}-{each.pid}"
        head = f"{each.name}, pid {each.pid} on {each.host}"
        parts = filter(None, [head, each.silence, "\n".join(each.waits), each.text])
        (directory / f"{name}.txt").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return directory


def _log_of_this_process() -> Path | None:
    log_file = Path(os.readlink("/proc/self/fd/2"))
    return log_file if log_file.suffix == ".log" else None


def _make_answers(kind: str, log_file: Path) -> int:
    """Makes a file of answers, and returns its descriptor."""
    return os.memfd_create(_prefix(kind, log_file.parent) + log_file.stem)


def _prefix(kind: str, logs: Path) -> str:
    """Returns the beginning of the names of the files of answers; a name has at most 249 bytes."""
    digest = hashlib.sha256(os.path.realpath(logs).encode()).hexdigest()
    return f"{kind}:{digest[:16]}:"


def _files(pid: int | str, prefix: str) -> list[tuple[str, Path]]:
    """Returns the rest of the names of a process's files of answers, and the files; OSError if it has ended."""
    start = f"/memfd:{prefix}"
    found: list[tuple[str, Path]] = []
    for file in (_PROC / str(pid) / "fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile, as that of the listing
            link = os.readlink(file)
            if link.startswith(start):
                found.append((link.removeprefix(start).removesuffix(" (deleted)"), file))
    return found


def _take(pid: int, logs: Path) -> ProcessStacks | None:
    """Returns the stacks of a process, or why there are none; None if its log is elsewhere."""
    try:
        stacks = _files(pid, _prefix(_STACKS, logs))
    except OSError:  # it has ended, or belongs to another user
        return None
    if not stacks:
        return None
    name, file = max(stacks)  # a forked child also has the file of its parent, with a shorter name
    found = ProcessStacks(name=name, pid=pid, host=socket.gethostname())
    try:
        if not int(_status(pid, "SigCgt"), 16) >> (_SIGNAL - 1) & 1:
            return replace(found, silence="it has replaced the handler of SIGUSR2")
        if pid == os.getpid():
            text = _dump_this_process()
        elif _status(pid, "State")[0] in "tT":
            return replace(found, silence="it is stopped, by SIGSTOP or a debugger")
        else:
            text = _signal(pid, file)
        if not text:
            state = _status(pid, "State")
            return replace(found, silence=f"no stacks within {_ANSWER_S:g} s; its state is {state}")
        waits = dict(_files(pid, _prefix(_WAITS, logs))).get(name)
        return replace(found, text=text, waits=() if waits is None else _read_waits(waits))
    except OSError:
        return replace(found, silence="it has ended")


def _start_telling(log_file: Path, waits: Callable[[], Sequence[str]], ended: threading.Event) -> threading.Thread:
    """Starts a thread that writes what this process waits for whenever another one has emptied the file."""
    descriptor = _make_answers(_WAITS, log_file)
    os.write(descriptor, _END.encode())

    def tell() -> None:
        with open(descriptor, "r+b", buffering=0) as file:
            while not ended.wait(_LOOK_S):
                if os.fstat(descriptor).st_size:
                    continue
                try:
                    lines = waits()
                except RuntimeError:  # a collection changed meanwhile; it looks again
                    continue
                except Exception as error:
                    lines = [f"what it waits for cannot be told: {error!r}"]
                file.seek(0)
                file.write("\n".join([*lines, _END]).encode())

    thread = threading.Thread(target=tell, name="waits", daemon=True)
    thread.start()
    return thread


def _read_waits(waits: Path) -> tuple[str, ...]:
    """Returns what a process waits for; empty if its interpreter is locked."""
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


def _dump_this_process() -> str:
    """Returns the stacks of this process, without the signal: its handler may read threads that are ending."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read().decode(errors="replace")


def _signal(pid: int, answers: Path) -> str:
    """Signals a process, waits until the file of its answers no longer grows, and returns what is new."""
    before = answers.stat().st_size
    os.kill(pid, _SIGNAL)
    size = before
    changed = time.monotonic()
    deadline = time.monotonic() + _ANSWER_S
    while (now := time.monotonic()) < deadline and (size == before or now < changed + _QUIET_S):
        time.sleep(0.05)
        grown = answers.stat().st_size
        if grown > size:
            size = grown
            changed = now
    with answers.open("rb") as file:
        file.seek(before)
        return file.read().decode(errors="replace")
