"""The connections of the gateway: other users of the machine, who have no key, keep nobody out and fill no log."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import resource
import time
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

_MAX_UNAUTHENTICATED = 1024
"""Connections that have shown no key; at most a quarter of the files that this process may open."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of `accept` that asyncio reports a hundred times a second."""
_REPORT_S = 60.0
LOG = logging.getLogger(__name__)
"""aiohttp's log of the gateway's server, without requests that are not HTTP."""


class Connections:
    """Listens for a server; of connections without a key, a new one closes the oldest above the limit."""

    def __init__(self, server: web.Server) -> None:
        self._server = server
        self._limit = min(_MAX_UNAUTHENTICATED, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._authenticated = set[web.RequestHandler]()
        self._next_report = -math.inf

    async def listen(self, host: str, port: int) -> asyncio.Server:
        """Begins to listen; port 0 is any free one."""
        LOG.addFilter(_is_server_fault)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._report)
        return await loop.create_server(self._connection, host, port)

    def authenticated(self, request: web.Request) -> None:
        """Notes that the connection of a request has shown a key."""
        self._authenticated.add(request.protocol)

    def _connection(self) -> web.RequestHandler:
        """Returns the protocol of a new connection."""
        self._authenticated.intersection_update(self._server.connections)
        others: list[web.RequestHandler] = []
        for each in self._server.connections:
            if each.connected and each not in self._authenticated:
                others.append(each)
        excess = len(others) + 1 - self._limit
        for oldest in others[: max(0, excess)]:
            oldest.force_close()
        return self._server()

    def _report(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Prints what asyncio reports; once a minute that no file is left for a connection."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _EXHAUSTED:
            loop.default_exception_handler(context)
        elif time.monotonic() >= self._next_report:
            self._next_report = time.monotonic() + _REPORT_S
            print(f"gateway: a connection cannot be accepted: {error.strerror}; tried again each second", flush=True)


def _is_server_fault(record: logging.LogRecord) -> bool:
    """Whether something other than the reading of a request that is not HTTP has failed."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))
