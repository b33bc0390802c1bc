"""A connection on which lines of JSON go both ways."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any, Final, cast

_PROBES: Final = {
    socket.TCP_KEEPIDLE: 10,  # seconds of silence before the first probe
    socket.TCP_KEEPINTVL: 5,  # between probes
    socket.TCP_KEEPCNT: 4,  # without an answer: the other is gone
    socket.TCP_USER_TIMEOUT: 30_000,  # milliseconds, for what was sent and is not acknowledged
}


class Lines:
    """A connection; it never fails but at its end, which receiving tells.

    Args:
        reader, writer: of asyncio's stream.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        own = cast(socket.socket, writer.get_extra_info("socket"))
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _PROBES.items():
            own.setsockopt(socket.IPPROTO_TCP, option, value)
        self.own_address: str = writer.get_extra_info("sockname")[0]
        self.other_address: str = writer.get_extra_info("peername")[0]

    async def send(self, fields: dict[str, Any]) -> None:
        """Writes a line; nobody reads it where the other is gone."""
        try:
            self._writer.write(json.dumps(fields).encode() + b"\n")
            await self._writer.drain()
        except OSError:
            return

    async def receive(self) -> dict[str, Any]:
        """Waits for a line; nothing where the connection has ended, or what comes is no such line."""
        try:
            line = await self._reader.readline()
            fields = json.loads(line) if line.endswith(b"\n") else {}
        except (OSError, ValueError):
            return {}
        return fields if isinstance(fields, dict) else {}

    def close(self) -> None:
        """Ends the connection."""
        self._writer.close()
