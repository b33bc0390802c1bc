"""The environment of a conversation: what users implement, and its inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.data.tokenizer import Message

Messages = Sequence[Message] | str
"""Messages, or a text that is read as it is, without a chat template."""


class FailedEnvironmentError(Exception):
    """An environment failed; the message says how."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentTask:
    """What a conversation is about: a row of the data.

    Args:
        prompt_id: id of the row.
        messages: messages of the row's prompt, one of the user for a plain text; empty without a
            prompt.
        fields: other columns of the row.
    """

    prompt_id: str
    messages: Sequence[Message] = ()
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def column(self, name: str) -> Any:
        """Returns another column of the row; a ValueError lists those that there are."""
        if name not in self.fields:
            known = ", ".join(self.fields) or "none"
            raise ValueError(f"the row has no column {name!r}; it has: {known}")
        return self.fields[name]


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call of a tool, as the model wrote it; `problem` says why the text of a call cannot be read."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    call_id: str = ""
    problem: str | None = None

    def answer(self, content: str) -> Message:
        """Returns a tool's answer as a message."""
        message = {"role": "tool", "name": self.name, "content": content}
        if self.call_id:
            message["tool_call_id"] = self.call_id
        return message


@dataclass(frozen=True, kw_only=True)
class Action:
    """What the model wrote in a turn.

    Args:
        text: text of the turn, without the end token.
        content: text without thoughts and calls of tools; a call that cannot be read stays in it.
        finished: False if the turn was cut off at a length limit.
    """

    text: str
    content: str
    token_ids: tuple[int, ...]
    finished: bool
    thoughts: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> Message:
        """The action as a message for chat templates."""
        return assistant_message(self.content, self.thoughts, self.tool_calls)


def assistant_message(content: str, thoughts: str | None, calls: Iterable[ToolCall]) -> Message:
    """Returns what the model wrote as a message; without the calls that have a problem."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thoughts is not None:
        message["reasoning_content"] = thoughts
    written: list[Mapping[str, Any]] = []
    for call in calls:
        if call.problem is None:
            function = {"name": call.name, "arguments": call.arguments}
            written.append({"type": "function", "id": call.call_id, "function": function})
    if written:
        message["tool_calls"] = written
    return message


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What the environment answers to a turn, or begins with.

    Args:
        messages: what follows.
        reward: reward of the turn.
        done: whether the conversation is complete; the messages are then not used.
        truncated: whether a limit of the environment ends the conversation.
        metrics: numbers about the turn; a run reports the mean over conversations of the last of
            each name.
    """

    messages: Messages = ()
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


class Environment:
    """The environment of one conversation; methods may be `async`.

    Attributes:
        tools: JSON schemas of the tools that are offered to the model.
    """

    tools: Sequence[Mapping[str, Any]] = ()

    def reset(self, task: EnvironmentTask, seed: int) -> Any:
        """Begins: returns messages, a text, or an `Observation`; may be `async`.

        Args:
            seed: seed, 64 bit, of all that is random in the environment; the same in every run.
        """
        del seed
        return task.messages

    def step(self, action: Action) -> Any:
        """Answers a turn with an `Observation`; may be `async`."""
        raise NotImplementedError(f"{type(self).__name__}.step")

    def close(self) -> Any:
        """Ends; is called once, also if something failed; may be `async`."""
