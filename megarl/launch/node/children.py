"""A child process of the agent, and where its output goes."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

_DRAIN_S = 2.0
"""For the last of the output, once the process has ended: others may have inherited the pipe, and go on."""
_CHUNK_BYTES = 1 << 16


class Child:
    """A child process; its output, of both kinds, goes to the end of a log file, and elsewhere too.

    Args:
        process: that runs.
        log: the file.
        echo: where its output goes besides.
    """

    def __init__(self, process: Process, log: Path, echo: BinaryIO | None) -> None:
        self._process = process
        self.tail = b""
        """The end of the output."""
        self._copying = asyncio.create_task(self._copy(log, echo))

    @classmethod
    async def start(
        cls, command: Sequence[str], environment: Mapping[str, str], log: Path, echo: BinaryIO | None = None
    ) -> Child:
        """Starts the command."""
        process = await asyncio.create_subprocess_exec(
            *command, env=environment, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT
        )
        return cls(process, log, echo)

    @property
    def last_line(self) -> str:
        """Of the output so far."""
        return self.tail.decode(errors="replace").rstrip().rpartition("\n")[2]

    async def wait(self) -> int:
        """Waits for its end; the exit code, 128 and the signal's number where one has ended it."""
        code = await self._process.wait()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._copying), _DRAIN_S)
        return code if code >= 0 else 128 - code

    async def stop(self, grace_s: float) -> int:
        """Ends it with SIGTERM, and with SIGKILL where it outlives the grace; the exit code."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            return await asyncio.wait_for(self.wait(), grace_s)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            return await self.wait()

    async def _copy(self, log: Path, echo: BinaryIO | None) -> None:
        assert self._process.stdout is not None
        with log.open("ab", buffering=0) as file:
            while chunk := await self._process.stdout.read(_CHUNK_BYTES):
                self.tail = (self.tail + chunk)[-_CHUNK_BYTES:]
                with contextlib.suppress(OSError):  # a full disk must not stop the process
                    file.write(chunk)
                with contextlib.suppress(OSError):  # nor somebody who listens no more
                    if echo is not None:
                        echo.write(chunk)
                        echo.flush()
