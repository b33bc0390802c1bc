"""Reward functions of users, working and broken."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.rewards.functions import Completion

NUMBER = 3


class Length:
    """Not a function."""


def length(completion: Completion, *, scale: float = 1.0) -> float:
    return scale * len(completion.response_ids)


def seen(completion: Completion) -> float:
    """1 if every field that a function may read is present."""
    return float(
        completion.fields["answer"] == completion.response
        and completion.prompt == f"p{completion.prompt_id}"
        and completion.finished == (completion.prompt_id != "b")
    )


def process(completion: Completion) -> float:
    """The process that scores."""
    return float(os.getpid())


def anything(completion: Completion) -> Any:
    """The value in the prompt's row."""
    return completion.fields["returns"]


def quotient(completion: Completion, *, size: int) -> float:
    return 1.0 / (len(completion.response_ids) - size)


def one_score(completions: Sequence[Completion]) -> list[float]:
    """A function of a batch that returns too few scores."""
    return [1.0 for _ in completions[:1]]


def score(completion: Completion) -> float:
    """A reserved name."""
    return 1.0


def contains_2(completion: Completion) -> float:
    """A name that numbering also makes."""
    return 1.0


def sleeps(completion: Completion) -> float:
    time.sleep(600)
    return 1.0


def holds_the_interpreter(completion: Completion) -> float:
    """C code that waits without letting any other thread run, or Python handle a signal."""
    ctypes.PyDLL(None).sleep(600)
    return 1.0


def starts_a_daemon(completion: Completion, *, pid_file: str, then: str = "return") -> float:
    """Leaves a process in a session of its own, without this one's environment, whose parent has ended."""
    daemon = f"import os, time; open({pid_file!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    between = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {daemon!r}], env={{}})"
    subprocess.run([sys.executable, "-c", between], env={}, start_new_session=True, check=True)
    while not (Path(pid_file).exists() and Path(pid_file).read_text()):
        time.sleep(0.01)
    if then == "exit":
        os._exit(3)
    if then == "sleep":
        time.sleep(600)
    return 1.0


def notes_and_sleeps(completion: Completion, *, file: str) -> float:
    with Path(file).open("a") as notes:
        notes.write("called\n")
    time.sleep(600)
    return 1.0


def takes_memory(completion: Completion, *, mib: int) -> float:
    return float(len(b"x" * (mib << 20)))


def exits(completion: Completion) -> float:
    os._exit(3)


def crashes(completion: Completion) -> float:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 1.0


def fails_at_first(completion: Completion, *, notes: str, failures: int) -> float:
    """Raises this many times for each prompt."""
    with Path(notes).open("a+") as file:
        file.write(f"{completion.prompt_id}\n")
        file.seek(0)
        calls = file.read().splitlines().count(completion.prompt_id)
    if calls <= failures:
        raise ConnectionError("the server is asleep")
    return float(calls)


def stubborn(completion: Completion) -> float:
    """Hangs on the first prompt only."""
    if completion.prompt_id == "b":
        time.sleep(600)
    return 1.0


def hangs_once_in_a_while(completion: Completion, *, every: int) -> float:
    """On each prompt whose number is a multiple."""
    if int(completion.prompt_id) % every == 0:
        time.sleep(600)
    return 1.0


def raises_once_in_a_while(completion: Completion, *, every: int) -> float:
    """On each prompt whose number is a multiple; 1 on the others."""
    return 1 / min(int(completion.prompt_id) % every, 1)
