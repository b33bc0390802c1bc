"""Chats as token ids that only grow: what follows a turn is encoded by itself, and the turn stays as it was sampled."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from megarl.data.tokenizer import Message, Tokenizer
from megarl.environments.environment import Action, ToolCall


class ChatRenderer(Protocol):
    """Writes chats as ids, and reads turns."""

    def begin(self, messages: Sequence[Message] | str, tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the prompt of the first turn; raises ValueError if the template refuses the chat."""
        ...

    def read(self, token_ids: Sequence[int], finished: bool) -> Action:
        """Returns what the model wrote in a turn."""
        ...

    def follow(
        self,
        before: Sequence[Message],
        action: Action,
        messages: Sequence[Message] | str,
        tools: Sequence[Mapping[str, Any]],
    ) -> list[int] | None:
        """Returns the ids that follow a finished turn, up to the start of the next one.

        None where the whole chat, written anew, would not continue what the model has read and written.

        Args:
            before: the chat up to the turn.
            messages: after the turn.
        """
        ...


class TemplateRenderer:
    """The chat template of a tokenizer.

    What it writes after a turn is the difference of two texts: the chat with the messages that follow, and without. The
    second must begin the first, or nothing is proved.
    """

    def __init__(self, tokenizer: Tokenizer, arguments: Mapping[str, Any]) -> None:
        self._tokenizer, self._arguments = tokenizer, arguments
        self._end = tokenizer.decode([tokenizer.end_token_id], special=True)

    def begin(self, messages: Sequence[Message] | str, tools: Sequence[Mapping[str, Any]]) -> list[int]:
        if isinstance(messages, str):
            return self._tokenizer.encode(messages)
        return self._tokenizer.chat(messages, tools=tools or None, arguments=self._arguments)

    def read(self, token_ids: Sequence[int], finished: bool) -> Action:
        ids = tuple(token_ids)
        own = ids[:-1] if finished and ids[-1:] == (self._tokenizer.end_token_id,) else ids
        text = self._tokenizer.decode(own, special=True)
        thoughts, rest = _thoughts(text)
        content, calls = _tool_calls(rest)
        return Action(text=text, content=content, token_ids=ids, finished=finished, thoughts=thoughts, tool_calls=calls)

    def follow(
        self,
        before: Sequence[Message],
        action: Action,
        messages: Sequence[Message] | str,
        tools: Sequence[Mapping[str, Any]],
    ) -> list[int] | None:
        if isinstance(messages, str):
            return self._tokenizer.continuation(messages)
        turn = [*before, action.message]
        without = self._tokenizer.written(turn, tools or None, self._arguments, answer=False)
        whole = self._tokenizer.written([*turn, *messages], tools or None, self._arguments)
        if not whole.startswith(without):
            return None
        _, _, rest = without.rpartition(self._end)
        return self._tokenizer.continuation(rest + whole.removeprefix(without))


def _thoughts(text: str) -> tuple[str | None, str]:
    """Splits a turn into its thoughts, None without any, and the rest."""
    thoughts, end, rest = text.partition("</think>")
    if not end:
        return None, text
    return thoughts.removeprefix("<think>").strip("\n"), rest.lstrip("\n")


_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def _tool_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Splits a text into its content, and the calls in the format of Hermes and Qwen."""
    calls = [_parsed(found, f"call_{index}") for index, found in enumerate(_CALL.findall(text))]
    return _CALL.sub("", text).rstrip() if calls else text, tuple(calls)


def _parsed(text: str, call_id: str) -> ToolCall:
    try:
        call: Any = json.loads(text)
        arguments = call.get("arguments", {})
        if not isinstance(call["name"], str) or not isinstance(arguments, dict):
            raise TypeError
    except (ValueError, TypeError, KeyError, AttributeError):
        return ToolCall(name="", call_id=call_id, problem=f"not a call of a tool in JSON: {text}")
    return ToolCall(name=call["name"], arguments=cast(dict[str, Any], arguments), call_id=call_id)
