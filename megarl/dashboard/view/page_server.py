"""Serves the page on this machine, to those who know its address."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl

from megarl.dashboard.view.page_export import page_text
from megarl.dashboard.view.run_view import RunView
from megarl.run.sinks import as_json

_HOST = "127.0.0.1"
_NAMES = (_HOST, "localhost")
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class PageServer(ThreadingHTTPServer):
    """Answers requests whose path begins with the token; port 0 is a free one."""

    daemon_threads = True

    def __init__(self, views: Sequence[RunView], port: int = 0) -> None:
        self.views = views
        self.token = secrets.token_urlsafe(16)
        self.page = page_text()
        super().__init__((_HOST, port), _PageRequest)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing about a browser that has left."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.server_port}/{self.token}/"


class _PageRequest(BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        """Answers the page, and questions about runs in JSON."""
        host = self.headers.get("Host", "").partition(":")[0]
        path, _, query = self.path.partition("?")
        token, _, rest = path.removeprefix("/").partition("/")
        # Another name is that of a page in the user's browser that pretends to be this one (DNS rebinding).
        if host not in _NAMES or not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", "The address is not the one that megarl view has printed.")
        elif not rest:
            self._send(HTTPStatus.OK, "text/html", self.server.page)
        else:
            self._answer(rest.removeprefix("api/"), dict(parse_qsl(query)))

    def _answer(self, question: str, query: dict[str, str]) -> None:
        try:
            if question == "runs":
                answer: Any = len(self.server.views)
            else:
                answer = self.server.views[int(query.pop("run", "0"))].answer(question, query)
            self._send(HTTPStatus.OK, "application/json", json.dumps(as_json(answer), allow_nan=False))
        except (ValueError, KeyError, IndexError) as error:
            self._send(HTTPStatus.BAD_REQUEST, "text/plain", f"{type(error).__name__}: {error}")
        except OSError as error:  # a shared file system may be away for a moment
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error.filename}: {error.strerror}")

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        headers = {**_HEADERS, "Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing."""
