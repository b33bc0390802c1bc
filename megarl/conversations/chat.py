"""Chats as token ids that only grow: what follows a turn is encoded by itself, and the turn stays as it was sampled."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Literal

from megarl.conversations.chat_families import family_call, find_family, tool_specs
from megarl.conversations.tool_calls import Schemas, find_reader
from megarl.data.tokenizer import Message, Tokenizer
from megarl.environments.environment import Action, Messages, ToolCall

_USER: Final[Message] = {"role": "user", "content": "u"}
_MARK: Final = "\ue000turn\ue001"
"""Stands for a turn; no template changes it."""


class ChatRenderer:
    """Writes chats as ids with the chat template of a tokenizer, and reads turns.

    What the model has read is what the template writes for the chat before the turn. If what it
    writes for the whole chat begins with this and the turn, token for token of the text as sampled,
    then the rest is what the model has to read next. By induction the ids are the template's text
    of the whole chat.

    A template may write a turn in another way than it was sampled: without thoughts or white space
    at its end, with other JSON. With the history `sampled`, the ids are kept all the same if what
    follows the turn does not depend on it: the template writes the same after another turn of
    another chat.

    A family of the package `renderers` helps where the template alone does not suffice: it reads
    calls in formats that are not known here, and with the history `sampled` it gives what follows a
    turn that the template rewrites.

    Args:
        arguments: arguments of the chat template.
        ends: ids that end turns, besides the end token of the tokenizer.
        context: tokens of a chat; texts that cannot fit raise TextTooLongError.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        arguments: Mapping[str, Any],
        *,
        ends: Collection[int] = (),
        history: Literal["template", "sampled"] = "template",
        context: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._arguments = arguments
        self._history = history
        self._limited = tokenizer if context is None else tokenizer.limited(context)
        self._ends = {tokenizer.end_token_id, *ends}
        self._anchor = tokenizer.decode([tokenizer.end_token_id], special=True)
        self._reader = find_reader(self._written)
        start = self._written([_USER], ()) or ""
        self._opens_thoughts = start.rstrip().endswith("<think>")
        self._knows_thoughts = not start or self._opens_thoughts or self._knows_given_thoughts()
        self._family: Any = None
        if self._reader is None or history == "sampled":
            self._family = find_family(tokenizer, arguments)

    def begin(self, messages: Messages, tools: Schemas) -> list[int]:
        """Returns the prompt of the first turn; a TextTooLongError or ValueError if there can be none."""
        if isinstance(messages, str):
            return self._limited.encode(messages)
        if tools and self._reader is None and self._family is None:
            known = "the known formats, those of Hermes, Qwen and Llama 3"
            raise ValueError(f"the chat template writes calls of tools in none of {known}")
        return self._limited.chat(messages, tools=tools or None, arguments=self._arguments)

    def read(self, token_ids: Sequence[int], finished: bool, *, prompt: Sequence[int], tools: Schemas) -> Action:
        """Returns what the model wrote in a turn after a prompt, which is all that it has read."""
        ids = tuple(token_ids)
        end = self._end(ids) if finished else ()
        text = self._decoded(ids[: len(ids) - len(end)])
        thoughts, content = self._thoughts(text)
        calls: tuple[ToolCall, ...] = ()
        if self._reader is not None:
            if tools:
                content, calls = self._reader(content, tools)
        elif self._family is not None:
            parsed = self._ask_family("parse_response", list(ids), tools=tool_specs(tools), prompt_ids=list(prompt))
            content = parsed.content
            thoughts = parsed.reasoning_content
            if tools:
                calls = tuple(family_call(call, index) for index, call in enumerate(parsed.tool_calls))
        return Action(
            text=text,
            content=content,
            token_ids=ids,
            finished=finished,
            thoughts=thoughts,
            tool_calls=calls,
        )

    def follow(
        self,
        before: Sequence[Message],
        action: Action,
        messages: Messages,
        *,
        prompt: Sequence[int],
        tools: Schemas,
    ) -> list[int] | None:
        """Returns the ids that follow a turn, up to the start of the next one; a TextTooLongError if they cannot fit.

        None where the turn was cut off, or where the whole chat, written anew, would not continue
        what the model has read and written.

        Args:
            before: the chat up to the turn.
            prompt: ids that the model has read before the turn.
        """
        if not action.finished:
            return None
        if isinstance(messages, str):
            return self._encoded_after(self._end(action.token_ids), messages)
        rest = self._rest(before, action, messages, tools)
        if rest is not None:
            return self._encoded_after(self._end(action.token_ids), rest)
        if self._family is None or self._history == "template":
            return None
        known = [*prompt, *action.token_ids]
        new = [dict(message) for message in messages]
        turn = (list(prompt), list(action.token_ids), new)
        bridge = self._ask_family("bridge_to_next_turn", *turn, tools=tool_specs(tools))
        if bridge is None or list(bridge.token_ids[: len(known)]) != known:
            return None
        return list(bridge.token_ids[len(known) :])

    def _ask_family(self, method: str, *args: Any, **options: Any) -> Any:
        """Calls the package; raises ValueError, which fails a conversation, for whatever it raises."""
        try:
            return getattr(self._family, method)(*args, **options)
        except Exception as error:
            raise ValueError(f"the package renderers failed in {method}: {error}") from error

    def _rest(
        self, before: Sequence[Message], action: Action, messages: Sequence[Message], tools: Schemas
    ) -> str | None:
        """Returns the text that follows a turn, if that is proved."""
        self._limited.check_length(messages)
        whole = self._written([*before, action.message, *messages], tools)
        read = self._written(before, tools)
        if whole is None or read is None:
            return None
        end = self._decoded(self._end(action.token_ids))
        proved = read + action.text + end
        if whole.startswith(proved):
            return whole.removeprefix(proved)
        if self._history == "template":
            return None
        turn: Message = {"role": "assistant", "content": _MARK}
        other = self._written([_USER, turn, *messages], tools) or ""
        head, _, after = other.partition(_MARK)
        if any(message["role"] == "system" for message in messages):
            alone = self._written([_USER, turn], tools) or ""
            if not alone.startswith(head + _MARK):
                return None  # the template writes it before the turn, where it is not read
        if not after or not after.startswith(end) or not whole.endswith(after):
            return None
        return after.removeprefix(end)

    def _end(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Returns the token that ended a finished turn; empty where a text did."""
        return tuple(token for token in ids[-1:] if token in self._ends)

    def _decoded(self, ids: Sequence[int]) -> str:
        """Decodes ids as they read after others: some tokenizers drop the first space of a text."""
        text = self._tokenizer.decode([self._tokenizer.end_token_id, *ids], special=True)
        return text.removeprefix(self._anchor)

    def _encoded_after(self, end: tuple[int, ...], text: str) -> list[int]:
        """Encodes a text as it reads after a token: some tokens take the white space that follows them."""
        ids = self._limited.continuation(self._decoded(end) + text)
        if tuple(ids[: len(end)]) != end:
            return self._limited.continuation(text)
        return ids[len(end) :]

    def _written(self, chat: Sequence[Message], tools: Schemas) -> str | None:
        """Returns the text of a chat up to the start of an answer; None where the template refuses the chat."""
        try:
            return self._tokenizer.written(chat, tools or None, self._arguments)
        except Exception:  # whatever the expressions of a template raise
            return None

    def _thoughts(self, text: str) -> tuple[str | None, str]:
        """Splits a turn into its thoughts, None without any, and the rest."""
        thoughts, _, rest = text.partition("</think>")
        opened = thoughts.lstrip().startswith("<think>")
        if not self._knows_thoughts or not (opened or self._opens_thoughts):
            return None, text
        if opened:
            thoughts = thoughts.lstrip().removeprefix("<think>")
        return thoughts.strip("\n"), rest.lstrip("\n")

    def _knows_given_thoughts(self) -> bool:
        """Whether the template writes thoughts that are given apart, or drops those in the content."""
        answer = {"role": "assistant", "content": "c"}
        tool = {"role": "tool", "content": "t"}
        thoughts = f"<think>\n{_MARK}\n</think>\n\nc"
        apart = self._written([_USER, answer | {"reasoning_content": _MARK}, tool], ())
        inside = self._written([_USER, answer | {"content": thoughts}, _USER], ())
        return (apart is not None and _MARK in apart) or (inside is not None and _MARK not in inside)
