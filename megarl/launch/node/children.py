"""A child process of the agent, and where its output goes."""

from __future__ import annotations

import asyncio
import contextlib
import os
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

_DRAIN_S = 2.0
"""For the last of the output, once the process has ended: others may have inherited the pipe, and go on."""
_KILLED_S = 10.0
"""For a process that is killed to be gone."""
_CHUNK_BYTES = 1 << 16

_copying: set[asyncio.Task[None]] = set()
"""Until they end: the event loop alone does not keep a task, and a child may be forgotten before its output ends."""


class Child:
    """A child process; its output, of both kinds, goes to the end of a log file, and elsewhere too.

    Args:
        process: that runs.
        output: what it prints.
        log: the file.
        echo: where its output goes besides.
    """

    def __init__(self, process: Process, output: asyncio.StreamReader, log: Path, echo: BinaryIO | None) -> None:
        self._process = process
        self.tail = b""
        """The end of the output."""
        self._copying = asyncio.create_task(self._copy(output, log, echo))
        _copying.add(self._copying)
        self._copying.add_done_callback(_copying.discard)

    @classmethod
    async def start(
        cls, command: Sequence[str], environment: Mapping[str, str], log: Path, echo: BinaryIO | None = None
    ) -> Child:
        """Starts the command."""
        # A pipe of its own: for asyncio a process has ended when its pipes are closed, which others may hold open.
        reading, writing = os.pipe()
        output = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(output)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(reading, "rb", 0))
        try:
            process = await asyncio.create_subprocess_exec(
                *command, env=environment, stdin=DEVNULL, stdout=writing, stderr=STDOUT
            )
        finally:
            os.close(writing)
        return cls(process, output, log, echo)

    @property
    def last_line(self) -> str:
        """Of the output so far."""
        return self.tail.decode(errors="replace").rstrip().rpartition("\n")[2]

    @property
    def last_message(self) -> str:
        """The end of the output so far: its last line, and where that is indented, all from the line that is not."""
        lines = self.tail.decode(errors="replace").rstrip().split("\n")
        first = max((index for index, line in enumerate(lines) if line[:1].strip()), default=0)
        return "\n".join(lines[first:])

    async def wait(self) -> int:
        """Waits for its end; the exit code, 128 and the signal's number where one has ended it."""
        code = await self._process.wait()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._copying), _DRAIN_S)
        return code if code >= 0 else 128 - code

    async def stop(self, grace_s: float) -> None:
        """Ends it with SIGTERM, and with SIGKILL where it outlives the grace."""
        for end, limit_s in ((self._process.terminate, grace_s), (self._process.kill, _KILLED_S)):
            with contextlib.suppress(ProcessLookupError):
                end()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wait(), limit_s)
                return

    async def _copy(self, output: asyncio.StreamReader, log: Path, echo: BinaryIO | None) -> None:
        """Reads on whatever becomes of the copies: a full disk must not stop the process, nor who listens no more."""
        with contextlib.ExitStack() as stack:
            copies = [] if echo is None else [echo]
            with contextlib.suppress(OSError):
                copies.append(stack.enter_context(log.open("ab", buffering=0)))
            while chunk := await output.read(_CHUNK_BYTES):
                self.tail = (self.tail + chunk)[-_CHUNK_BYTES:]
                for copy in copies:
                    with contextlib.suppress(OSError):
                        copy.write(chunk)
                        copy.flush()
