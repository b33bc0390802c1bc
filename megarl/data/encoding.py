"""Token ids from the columns of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from megarl.data.sources import UnusableRowError, listed
from megarl.data.tokenizer import Message, Tokenizer
from megarl.files import parse_json
from megarl.types import Int32Array

Ids = Int32Array
"""[tokens] int32."""
Columns = dict[str, Any]

PROMPTS = ("prompt_ids", "token_ids", "prompt")
"""Columns of a prompt, by precedence."""


class Encoder:
    """Encodes prompts and responses that are text, chats or ids.

    Args:
        tokenizer: tokenizer; None where all rows have ids.
        chat_template: whether a text prompt becomes a chat of one user message.
        max_tokens: largest number of tokens of a row.
        template_arguments: arguments of the chat template.

    Raises:
        ValueError: the tokenizer does not fit, or a needed one is missing.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        chat_template: bool,
        max_tokens: int,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        if tokenizer is not None:
            tokenizer.check(vocab_size=vocab_size, chat_template=chat_template)
        elif chat_template:
            raise ValueError("chat_template needs a tokenizer, and there is none")
        self._tokenizer = None if tokenizer is None else tokenizer.limited(max_tokens)
        self._vocab_size = vocab_size
        self._chat_template = chat_template
        self._max_tokens = max_tokens
        self._template_arguments = template_arguments

    def prompt(self, columns: Columns, *names: str) -> Ids:
        """Encodes a prompt from the row's first column of these; those named `*_ids` hold ids."""
        name = first_column(columns, *names)
        value = columns[name]
        if name.endswith("_ids"):
            return self.ids(name, value)
        chat = self.messages(name, value)
        if chat is not None:
            return self.chat(chat, columns.get("tools"))
        if "tools" in columns:
            raise ValueError("tools are for a prompt that is a chat: give messages, or set chat_template to true")
        return _as_array("prompt", self._text_tokenizer.encode(value))

    def messages(self, name: str, value: Any) -> list[Message] | None:
        """Returns the messages of a prompt in a column; None for text and ids."""
        if name.endswith("_ids"):
            return None
        if not isinstance(value, str) or name == "messages":
            return messages(name, value)
        if self._chat_template:
            return [{"role": "user", "content": value}]
        return None

    def chat(self, chat: Sequence[Message], tools: object = None) -> Ids:
        """Encodes a prompt that is a chat; `tools` is the row's column of that name."""
        if chat[-1]["role"] == "assistant":
            raise ValueError("the last message of a prompt is the assistant's: nothing is left to answer")
        offered = _tools(tools)
        ids = self._text_tokenizer.chat(chat, tools=offered, arguments=self._template_arguments)
        return _as_array("prompt", ids)

    def response(self, columns: Columns, *names: str) -> Ids:
        """Encodes a response, found as `prompt` finds a prompt."""
        name = first_column(columns, *names)
        value = columns[name]
        if name.endswith("_ids"):
            return self.ids(name, value)
        if isinstance(value, str):
            return self.answer(value)
        chat = messages(name, value)
        if len(chat) != 1 or chat[0]["role"] != "assistant":
            raise ValueError(f"{name} must be text, or a list of one message of the assistant's")
        return self.answer_message(chat[0])

    def answer_message(self, message: Message) -> Ids:
        """Encodes a response that is the assistant's message; one with tool calls is refused."""
        if "tool_calls" in message:
            raise ValueError("a response has tool_calls, which are not trained on: write the call into its content")
        return self.answer(message["content"])

    def answer(self, text: str) -> Ids:
        """Encodes a response that is text; raises UnusableRowError if it is blank."""
        if not text.strip():
            raise UnusableRowError("empty", "a response is empty")
        return _as_array("response", self._text_tokenizer.respond(text))

    def ids(self, name: str, value: object) -> Ids:
        """Checks ids and returns them as an array; raises UnusableRowError if there are none."""
        if not isinstance(value, list):
            raise ValueError(f"{name} must be a list of token ids")
        for token in cast(list[Any], value):
            if type(token) is not int or not 0 <= token < self._vocab_size:
                raise ValueError(f"{name} holds {token!r}: ids are integers from 0 to {self._vocab_size - 1}")
        return _as_array(name, cast(list[int], value))

    def check_length(self, *parts: Ids) -> None:
        """Raises UnusableRowError if these parts of a row are too long together."""
        tokens = sum(map(len, parts))
        if tokens > self._max_tokens:
            reason = f"{tokens} tokens are too many: at most {max(self._max_tokens, 0)} fit"
            raise UnusableRowError("too_long", reason, tokens)

    @property
    def _text_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ValueError("text needs a tokenizer, and there is none; set model.tokenizer, or give token ids")
        return self._tokenizer


def first_column(columns: Mapping[str, Any], *names: str) -> str:
    """Returns the first of the names that is a column; raises ValueError if none is."""
    for name in names:
        if name in columns:
            return name
    usual = next(name for name in names if not name.endswith("_ids"))
    there = f"its columns are {listed(columns)}; columns: {{{usual}: NAME}} reads another one"
    raise ValueError(f"a row must have a column {' or '.join(names)}; {there}")


def messages(name: str, value: object) -> list[Message]:
    """Returns a chat; raises ValueError unless its messages have role and content, both text."""
    if not isinstance(value, list) or not value:
        kinds = "a list of messages" if name == "messages" else "a list of messages, or text"
        raise ValueError(f"{name} must be {kinds}")
    chat: list[Message] = []
    for message in cast(list[Any], value):
        if not isinstance(message, Mapping):
            raise ValueError(f"{name} holds {message!r}: a message has a role and a content")
        fields = {key: entry for key, entry in cast(Mapping[str, Any], message).items() if entry is not None}
        if fields.get("tool_calls"):
            fields.setdefault("content", "")
        if not isinstance(fields.get("role"), str) or not isinstance(fields.get("content"), str):
            raise ValueError(f"{name} holds a message whose role and content are not both text: {message!r}")
        chat.append(fields)
    return chat


def _tools(column: object) -> list[Mapping[str, Any]] | None:
    """Returns the tools of a row, from a list or its text in JSON; None without any."""
    tools: object = column
    if isinstance(column, str):
        tools = parse_json(column)
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in cast(list[Any], tools)):
        raise ValueError("tools must be a list of descriptions of tools, as JSON schemas")
    return cast(list[Mapping[str, Any]], tools)


def _as_array(name: str, ids: list[int]) -> Ids:
    if not ids:
        raise UnusableRowError("empty", f"{name} has no token")
    return np.array(ids, dtype=np.int32)
