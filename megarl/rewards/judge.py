"""A judge: a model behind an OpenAI-compatible endpoint, asked for the score of a response."""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from string import Formatter
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator

if TYPE_CHECKING:
    from httpx import AsyncClient, Response

_FIRST_WAIT_S = 0.5
_BUSY = 429


def _is_address(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.query:
        raise ValueError("an address like https://host/v1, without user, password and query")
    return url


def _has_response(template: str) -> str:
    try:
        names = _names(template)
    except ValueError as error:
        raise ValueError(f"a text with names in braces; others are doubled: {error}") from None
    if "response" not in names:
        raise ValueError("a text with {response}")
    if wrong := [name for name in names if not name.isidentifier()]:
        raise ValueError(f"a text with prompt, response or a column in braces, not {{{wrong[0]}}}; others are doubled")
    return template


def _adds_to_request(options: Mapping[str, Any]) -> Mapping[str, Any]:
    if given := sorted({"model", "messages", "n", "stream"}.intersection(options)):
        raise ValueError(f"without {', '.join(given)}: a request has one answer to the template, by the model given")
    return options


Address = Annotated[str, AfterValidator(_is_address)]
JudgeTemplate = Annotated[str, AfterValidator(_has_response)]
JudgeOptions = Annotated[Mapping[str, Any], AfterValidator(_adds_to_request)]


def _names(template: str) -> list[str]:
    """Returns what a template has in braces, with conversions and formats as part of the name."""
    found = [part[1:] for part in Formatter().parse(template) if part[1] is not None]
    return [f"{name}{f'!{how}' if how else ''}{f':{layout}' if layout else ''}" for name, layout, how in found]


def columns_of_template(template: str) -> tuple[str, ...]:
    """Returns the columns of a prompt's row that a template names."""
    return tuple(name for name in dict.fromkeys(_names(template)) if name not in ("prompt", "response"))


@dataclass(frozen=True, kw_only=True)
class JudgeEndpoint:
    """An endpoint of chat completions.

    Args:
        url: up to and without `/chat/completions`.
        key_variable: variable of the environment that has the key; None without one.
        timeout: of an attempt, seconds.
        attempts: while the endpoint is busy, fails or cannot be reached.
    """

    url: str
    key_variable: str | None
    timeout: float
    attempts: int

    async def answer(self, request: Mapping[str, Any]) -> str:
        """Returns the text that answers a request; waits between attempts, twice as long each time.

        Raises:
            RuntimeError: the endpoint gave no complete answer.
            ValueError: there is no key.
        """
        key = self._key()
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        wait, problem = _FIRST_WAIT_S, ""
        for attempt in range(self.attempts):
            if attempt:
                await asyncio.sleep(wait)
            wait = min(_FIRST_WAIT_S * 2**attempt * random.SystemRandom().uniform(1, 1.5), self.timeout)
            reply = await self._post(request, headers)
            if isinstance(reply, str):
                problem = reply
                continue
            said = reply.text[:500] if key is None else reply.text.replace(key, "(secret)")[:500]
            if reply.is_success:
                return _text(reply, said)
            problem = f"status {reply.status_code}: {said}"
            if reply.status_code != _BUSY and not reply.is_server_error:
                raise RuntimeError(f"the judge at {self.url} refused the request with {problem}")
            if (asked := reply.headers.get("retry-after", "")).isdecimal():
                wait = min(max(wait, float(asked)), self.timeout)
        raise RuntimeError(f"the judge at {self.url} did not answer in {self.attempts} attempts; the last: {problem}")

    async def _post(self, request: Mapping[str, Any], headers: Mapping[str, str]) -> Response | str:
        """Makes an attempt; returns what was wrong where there is no response."""
        from httpx import TransportError

        try:
            async with asyncio.timeout(self.timeout):
                client = _client(asyncio.get_running_loop())
                url = f"{self.url.rstrip('/')}/chat/completions"
                return await client.post(url, json=request, headers=headers)
        except TimeoutError:
            return f"it took longer than {self.timeout:g} s"
        except TransportError as error:
            return repr(error)

    def _key(self) -> str | None:
        if self.key_variable is None:
            return None
        key = os.environ.get(self.key_variable, "").strip()
        if not key or not key.isascii() or not key.isprintable():
            rule = "must have the judge's key, in printable ASCII, where the functions run"
            raise ValueError(f"the environment variable {self.key_variable} {rule}")
        return key


def read_score(text: str, pattern: str) -> float:
    """Returns the number in the group of a pattern's last match; raises ValueError with the text if there is none."""
    found = re.findall(pattern, text, re.DOTALL)
    try:
        return float(found[-1])
    except (IndexError, ValueError):
        raise ValueError(f"the judge's answer has no number where {pattern!r} matches: {text[-500:]!r}") from None


def _text(reply: Response, said: str) -> str:
    """Returns the answer in a chat completion, which messages show as `said`."""
    try:
        choice = reply.json()["choices"][0]
        text, reason = choice["message"]["content"], choice.get("finish_reason")
    except (ValueError, LookupError, TypeError, AttributeError):
        raise RuntimeError(f"the judge's reply is no chat completion: {said!r}") from None
    if not isinstance(text, str) or reason == "length":
        raise RuntimeError(f"the judge's answer has no end, by finish_reason {reason!r}: {text!r:.500}")
    return text


@lru_cache(maxsize=1)
def _client(loop: asyncio.AbstractEventLoop) -> AsyncClient:
    """Returns the client of an event loop, whose connections stay open; attempts limit time and calls."""
    from httpx import AsyncClient, Limits

    del loop
    return AsyncClient(timeout=None, limits=Limits(max_connections=None, max_keepalive_connections=None))
