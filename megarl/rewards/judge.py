"""Judges: models that score responses, behind an OpenAI-compatible endpoint or on engines of the run."""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator

from megarl.config.schema import JudgeModel
from megarl.config.schema.questions import template_columns
from megarl.data.tokenizer import load_tokenizer
from megarl.rewards.completion import Completion

if TYPE_CHECKING:
    from httpx import AsyncClient, Response

JUDGE_MODEL: Final = "judge_model"
"""Name of `reward.judge_model` among the rewards."""
_FIRST_WAIT_S = 0.5
_RETRIED: Final = (408, 409, 429)
"""HTTP statuses to retry, besides 5xx (as OpenAI's client)."""


def _is_address(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.query:
        raise ValueError("an address like https://host/v1, without user, password and query")
    return url


def _adds_to_request(options: Mapping[str, Any]) -> Mapping[str, Any]:
    given = sorted({"model", "messages", "n", "stream"}.intersection(options))
    if given:
        rule = "a request has one answer to the template, by the model given"
        raise ValueError(f"without {', '.join(given)}: {rule}")
    return options


Address = Annotated[str, AfterValidator(_is_address)]
JudgeOptions = Annotated[Mapping[str, Any], AfterValidator(_adds_to_request)]


def question(template: str, completion: Completion) -> str:
    """Returns a judge's question about a response; raises ValueError where the row lacks a column."""
    columns = {name: completion.field(name) for name in template_columns(template)}
    return template.format(**{"prompt": completion.prompt, "response": completion.response, **columns})


class JudgePrompts:
    """Writes the questions to the model of `reward.judge_model`, and reads its answers."""

    def __init__(self, settings: JudgeModel) -> None:
        self._settings = settings
        self._tokenizer = load_tokenizer(settings.path)

    def ask(self, completion: Completion) -> tuple[tuple[int, ...], str | None]:
        """Returns a question's token ids, and what is wrong with it."""
        settings = self._settings
        try:
            text = question(settings.template, completion)
            if self._tokenizer.has_chat_template:
                ids = self._tokenizer.chat([{"role": "user", "content": text}])
            else:
                ids = self._tokenizer.encode(text)
        except ValueError as error:
            return (), str(error)
        room = settings.max_model_len - settings.max_new_tokens
        if not 0 < len(ids) <= room:
            limits = f"from 1 to {room} have room: reward.judge_model.max_model_len less max_new_tokens"
            return (), f"the judge's question has {len(ids)} tokens, and {limits}"
        return tuple(ids), None

    def read(self, ids: Sequence[int], finished: bool) -> float:
        """Returns the score in an answer; raises ValueError if there is none, or the answer has no end."""
        text = self._tokenizer.decode(ids)
        if not finished:
            raise ValueError(f"the judge's answer has no end in {len(ids)} tokens: {text[-500:]!r}")
        return read_score(text, self._settings.pattern)


@dataclass(frozen=True, kw_only=True)
class JudgeEndpoint:
    """An endpoint of chat completions.

    Args:
        url: address up to and without `/chat/completions`.
        key_variable: variable of the environment that has the key; None without one.
        timeout: seconds that an attempt may take.
        attempts: maximum attempts while the endpoint is busy, fails or cannot be reached.
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
        headers: dict[str, str] = {}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        wait = _FIRST_WAIT_S
        problem = ""
        for attempt in range(self.attempts):
            if attempt:
                await asyncio.sleep(wait)
            spread = random.SystemRandom().uniform(1, 1.5)
            wait = min(_FIRST_WAIT_S * 2**attempt * spread, self.timeout)
            reply = await self._post(request, headers)
            if isinstance(reply, str):
                problem = reply
                continue
            text = reply.text
            if key is not None:
                text = text.replace(key, "(secret)")
            if reply.is_success:
                return _answer_text(reply, text[:500])
            problem = f"status {reply.status_code}: {text[:500]}"
            if reply.status_code not in _RETRIED and not reply.is_server_error:
                raise RuntimeError(f"the judge at {self.url} refused the request with {problem}")
            requested = _retry_after(reply.headers.get("retry-after", ""))
            wait = min(max(wait, requested), self.timeout)
        attempts = f"{self.attempts} attempts; the last: {problem}"
        raise RuntimeError(f"the judge at {self.url} did not answer in {attempts}")

    async def _post(self, request: Mapping[str, Any], headers: Mapping[str, str]) -> Response | str:
        """Makes an attempt; returns what was wrong where there is no response."""
        from httpx import RequestError

        try:
            async with asyncio.timeout(self.timeout):
                client = _client(asyncio.get_running_loop())
                url = f"{self.url.rstrip('/')}/chat/completions"
                return await client.post(url, json=request, headers=headers)
        except TimeoutError:
            return f"it took longer than {self.timeout:g} s"
        except RequestError as error:  # also a body that cannot be decoded
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
    with suppress(IndexError, ValueError):
        score = float(found[-1])
        if math.isfinite(score):
            return score
    raise ValueError(f"the judge's answer has no number where {pattern!r} matches: {text[-500:]!r}")


def _retry_after(after: str) -> float:
    """Returns the seconds of a `Retry-After`, a number or a date; 0 where it is neither."""
    if after.isdecimal():
        return float(after)
    with suppress(ValueError):
        return parsedate_to_datetime(after).timestamp() - time.time()
    return 0.0


def _answer_text(reply: Response, shown: str) -> str:
    """Returns the answer in a chat completion, which messages show as `shown`."""
    try:
        choice = reply.json()["choices"][0]
        text = choice["message"]["content"]
        reason = choice.get("finish_reason")
    except (ValueError, LookupError, TypeError, AttributeError):
        raise RuntimeError(f"the judge's reply is no chat completion: {shown!r}") from None
    if not isinstance(text, str) or reason == "length":
        problem = f"has no end, by finish_reason {reason!r}"
        raise RuntimeError(f"the judge's answer {problem}: {text!r:.500}")
    return text


@lru_cache(maxsize=1)
def _client(loop: asyncio.AbstractEventLoop) -> AsyncClient:
    """Returns the client of an event loop, whose connections stay open; attempts limit time and calls."""
    from httpx import AsyncClient, Limits

    del loop
    return AsyncClient(timeout=None, limits=Limits(max_connections=None, max_keepalive_connections=None))
