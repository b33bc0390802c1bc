"""Tries a chat template on short chats in a child process, before the data is written with it.

Templates of model directories are programs of others: Jinja's sandbox bounds neither
their time nor their memory.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import resource
import warnings
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from megarl.data.tokenizer import Message, Tokenizer
from megarl.files import format_bytes
from megarl.rewards.child_process import end_with_parent

_SECONDS = 10.0
_MEMORY = 256 << 20
"""Bytes, besides what this process has."""
_USER: Final[Message] = {"role": "user", "content": "u"}
_CHATS: Final = (
    [_USER],
    [{"role": "system", "content": "s"}, _USER],
    [_USER, {"role": "assistant", "content": "a"}, _USER],
)
_TOOL: Final = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}


def check_template(tokenizer: Tokenizer, arguments: Mapping[str, Any]) -> None:
    """Raises ValueError if the chat template takes too much time or memory for a short chat."""
    context = multiprocessing.get_context("fork")  # a new interpreter would load the tokenizer for seconds
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_write_chats, args=(tokenizer, arguments, sending, os.getpid()))
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of threads: Jinja needs none
        process.start()
    sending.close()
    with receiving:
        try:
            problem = f"it takes longer than {_SECONDS:g} s"
            if receiving.poll(_SECONDS):
                problem = receiving.recv_bytes().decode()
        except EOFError:
            problem = "it ends its process"
        finally:
            process.kill()
            process.join()
    if problem:
        raise ValueError(f"the chat template cannot write a short chat: {problem}")


def _write_chats(
    tokenizer: Tokenizer, arguments: Mapping[str, Any], sending: Connection[Any, Any], parent: int
) -> None:
    """Runs in the child: sends the problem, "" if there is none."""
    end_with_parent(parent)
    os.setsid()
    limit = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize() + _MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    problem = ""
    for chat, tools in itertools.product(_CHATS, (None, [_TOOL])):
        try:
            tokenizer.written(chat, tools, arguments)
        except MemoryError:
            problem = f"it takes more than {format_bytes(_MEMORY)} of memory"
        except Exception:  # the template refuses the chat
            continue
    sending.send_bytes(problem.encode())
