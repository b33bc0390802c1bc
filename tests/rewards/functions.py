"""Reward functions as a user writes them, good ones and bad ones."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from megarl.rewards.functions import Answer

NUMBER = 3


class Length:
    """Not a function."""


def length(answer: Answer, *, scale: float = 1.0) -> float:
    return scale * len(answer.response_ids)


def seen(answer: Answer) -> float:
    """1 where everything is there that a function may read."""
    return float(
        answer.fields["answer"] == answer.response
        and answer.prompt == f"p{answer.prompt_id}"
        and answer.finished == (answer.prompt_id != "b")
    )


def process(answer: Answer) -> float:
    """The process that scores."""
    return float(os.getpid())


def anything(answer: Answer) -> Any:
    """What the prompt's row says."""
    return answer.fields["returns"]


def quotient(answer: Answer, *, size: int) -> float:
    return 1.0 / (len(answer.response_ids) - size)


async def later(answer: Answer) -> float:
    return 1.0


def score(answer: Answer) -> float:
    """A name that is taken."""
    return 1.0


def contains_2(answer: Answer) -> float:
    """A name that numbering makes, too."""
    return 1.0


def sleeps(answer: Answer) -> float:
    time.sleep(600)
    return 1.0


def holds_the_interpreter(answer: Answer) -> float:
    """C code that waits without letting any other thread run, or Python handle a signal."""
    ctypes.PyDLL(None).sleep(600)
    return 1.0


def runs_a_program(answer: Answer, *, pid_file: str) -> float:
    program = subprocess.Popen(["sleep", "600"])
    Path(pid_file).write_text(str(program.pid))
    return float(program.wait())


def exits(answer: Answer) -> float:
    os._exit(3)


def crashes(answer: Answer) -> float:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 1.0


def fails_at_first(answer: Answer, *, notes: str, failures: int) -> float:
    """Raises as often as that for each prompt."""
    with Path(notes).open("a+") as file:
        file.write(f"{answer.prompt_id}\n")
        file.seek(0)
        calls = file.read().splitlines().count(answer.prompt_id)
    if calls <= failures:
        raise ConnectionError("the server is asleep")
    return float(calls)


def stubborn(answer: Answer) -> float:
    """Hangs on the first prompt alone."""
    if answer.prompt_id == "b":
        time.sleep(600)
    return 1.0


def hangs_once_in_a_while(answer: Answer, *, every: int) -> float:
    """On each prompt whose number is a multiple."""
    if int(answer.prompt_id) % every == 0:
        time.sleep(600)
    return 1.0


def raises_once_in_a_while(answer: Answer, *, every: int) -> float:
    """On each prompt whose number is a multiple; 1 on the others."""
    return 1 / min(int(answer.prompt_id) % every, 1)
