"""Judges: models that score responses, behind an OpenAI-compatible endpoint or on engines of the run."""

from __future__ import annotations

import asyncio
import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from megarl.config.schema import JudgeModel
from megarl.config.schema.questions import PatternWithGroup, Template, template_columns
from megarl.data.tokenizer import load_tokenizer
from megarl.rewards.completion import Completion

if TYPE_CHECKING:
    from openai import AsyncOpenAI

JUDGE_MODEL: Final = "judge_model"
"""Name of `reward.judge_model` among the rewards."""


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


async def judge(
    completion: Completion,
    *,
    url: Address,
    model: str,
    template: Template,
    pattern: PatternWithGroup,
    key_variable: str | None = None,
    options: JudgeOptions | None = None,
    timeout: Annotated[float, Field(gt=0)] = 30.0,
    attempts: Annotated[int, Field(ge=1)] = 5,
) -> float:
    """The number that a model behind an OpenAI-compatible endpoint gives the response.

    Args:
        template: question with {prompt}, {response} and columns of the row.
        pattern: expression whose group's last match in the answer is the number.
        options: further entries of the request; None: temperature 0.
    """
    from openai import OpenAIError

    extra = {"temperature": 0} if options is None else options
    text = question(template, completion)
    key = _key(key_variable)
    client = _client(asyncio.get_running_loop(), url, key, timeout, attempts)
    try:
        reply = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": text}], extra_body=extra
        )
    except OpenAIError as error:
        text = f"the judge at {url} did not answer in {attempts} attempts: {error!r:.1000}"
        raise RuntimeError(text.replace(key, "(secret)") if key else text) from None
    try:
        choice = reply.choices[0]
        text = choice.message.content
    except (LookupError, TypeError, AttributeError):
        raise RuntimeError(f"the reply of the judge at {url} is no chat completion") from None
    if not isinstance(text, str) or choice.finish_reason == "length":
        problem = f"has no end, by finish_reason {choice.finish_reason!r}"
        raise RuntimeError(f"the judge's answer {problem}: {text!r:.500}")
    return read_score(text, pattern)


def _key(variable: str | None) -> str:
    if variable is None:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        rule = "must have the judge's key, in printable ASCII, where the functions run"
        raise ValueError(f"the environment variable {variable} {rule}")
    return key


@lru_cache
def _client(loop: asyncio.AbstractEventLoop, url: str, key: str, timeout: float, attempts: int) -> AsyncOpenAI:
    """Returns an endpoint's client in an event loop, whose connections stay open; retries are the client's."""
    from openai import AsyncOpenAI

    del loop
    return AsyncOpenAI(base_url=url, api_key=key or "EMPTY", timeout=timeout, max_retries=attempts - 1)


def read_score(text: str, pattern: str) -> float:
    """Returns the number in the group of a pattern's last match; raises ValueError with the text if there is none."""
    found = re.findall(pattern, text, re.DOTALL)
    with suppress(IndexError, ValueError):
        score = float(found[-1])
        if math.isfinite(score):
            return score
    raise ValueError(f"the judge's answer has no number where {pattern!r} matches: {text[-500:]!r}")
