"""What clients ask a gateway for, in any protocol; what cannot be honoured exactly is refused in words."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megarl.conversations.chat_session import SessionTurn
from megarl.data.tokenizer import Message
from megarl.environments.environment import ToolCall

_TEXTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text")

_MOST_ANSWERS = 128


class GatewayError(Exception):
    """A request that is not honoured; the message says why."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the run samples.

    Args:
        override: whether requests that want it otherwise are sampled as the run's, not refused.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    override: bool = False


@dataclass(frozen=True, kw_only=True)
class GatewayPlace:
    """What a run decides for a gateway.

    Args:
        file: gets the address and the run's key, for a harness elsewhere.
        rewarded: whether something else than a harness gives rewards.
    """

    file: str
    sampling: Sampling
    rewarded: bool


@dataclass(frozen=True, kw_only=True)
class TurnAsk:
    """A request for turns.

    Args:
        messages: the whole chat; empty where `prompt` is a text or token ids.
        most: tokens of a turn.
        count: turns that answer the same chat, each on a branch.
        with_ids: whether the answer has token ids.
    """

    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    most: int | None = None
    count: int = 1
    logprobs: bool = False
    with_ids: bool = False
    stream: bool = False
    with_usage: bool = False

    @cached_property
    def digest(self) -> str:
        """Identifies what is asked: the same again is answered by the same turns."""
        asked = [self.messages, self.prompt, self.tools, self.most, self.count]
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:24]


@dataclass(frozen=True, kw_only=True)
class GatewayAnswer:
    """A turn, and the calls of tools that can be read, under ids that are unique in the session."""

    turn: SessionTurn
    calls: tuple[ToolCall, ...]


@dataclass(frozen=True, kw_only=True)
class GatewayReply:
    """The turns that answer a request.

    Args:
        reply_id: the same for a retry.
        created: Unix time, seconds.
        decode: returns the text of token ids, with special tokens.
    """

    ask: TurnAsk
    answers: Sequence[GatewayAnswer]
    reply_id: str
    created: int
    model: str
    decode: Callable[[Sequence[int]], str]

    @property
    def prompt_tokens(self) -> int:
        return len(self.answers[0].turn.prompt)

    @property
    def sampled_tokens(self) -> int:
        return sum(len(answer.turn.action.token_ids) for answer in self.answers)


@dataclass(kw_only=True)
class RequestFields:
    """The fields of a request, which are taken one by one; what is left in the end is refused. Null is like absent.

    Args:
        call_ids: of the model's calls of tools, by those that the client was told.
    """

    left: dict[str, Any]
    sampling: Sampling
    model: str
    call_ids: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        self.left = {name: value for name, value in self.left.items() if value is not None}
        if (model := self.take("model", str, self.model)) != self.model:
            raise GatewayError(
                f"model = {model!r}: this session has {self.model!r} alone (environment.args.model)", 404
            )

    def take(self, name: str, kind: type, default: Any = None) -> Any:
        """Returns a field of a type."""
        value = self.left.pop(name, default)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not default and not (whole if kind is int else isinstance(value, kind)):
            raise GatewayError(f"{name} must be of the type {kind.__name__}, not {value!r:.80}")
        return value

    def count(self, *names: str) -> int | None:
        """Returns the first of some fields that is there, a positive number."""
        found = {name: value for name in names if (value := self.take(name, int)) is not None}
        for name, value in found.items():
            if value < 1:
                raise GatewayError(f"{name} = {value}: at least 1")
        return next(iter(found.values()), None)

    def several(self) -> int:
        """Returns how many answers are wanted."""
        count = self.count("n") or 1
        if count > _MOST_ANSWERS:
            raise GatewayError(f"n = {count}: at most {_MOST_ANSWERS}")
        return count

    def items(self, name: str) -> list[dict[str, Any]]:
        """Returns a list of objects."""
        found: list[Any] = self.take(name, list, [])
        for index, item in enumerate(found):
            if not isinstance(item, dict):
                raise GatewayError(f"{name}[{index}] must be an object, not {item!r:.80}")
        return found

    def only(self, accepted: Mapping[str, Sequence[Any]]) -> None:
        """Refuses fields that have another value than one of those that change nothing."""
        for name, values in accepted.items():
            value = self.left.pop(name, None)
            if value is not None and value not in values:
                rule = f"{' or '.join(map(repr, values))}, or absent" if values else "absent"
                raise GatewayError(f"{name} = {value!r:.80}: this endpoint cannot honour it; it must be {rule}")

    def sampled(self) -> None:
        """Refuses fields that want other sampling than the run's."""
        own = {"temperature": self.sampling.temperature, "top_p": self.sampling.top_p, "top_k": self.sampling.top_k}
        for name, value in (own | {"seed": None, "presence_penalty": 0, "frequency_penalty": 0}).items():
            wanted = self.left.pop(name, None)
            if wanted is not None and wanted != value and not self.sampling.override:
                rule = f"the run samples with {value}" if name in own else "the run samples otherwise"
                fix = "leave it out, or set environment.args.override_sampling: true, which ignores it"
                raise GatewayError(f"{name} = {wanted!r:.80}: {rule}; {fix}")

    def drop(self, *names: str) -> None:
        """Ignores fields that have no effect on what is sampled."""
        for name in names:
            self.left.pop(name, None)

    def end(self) -> None:
        """Refuses what is left."""
        if self.left:
            raise GatewayError(f"{', '.join(self.left)}: this endpoint does not know how to honour that; leave it out")


def text_of(content: object, where: str) -> str:
    """Returns a content that is a text, or a list of texts, which are joined by line breaks."""
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    parts: list[Any] = content if isinstance(content, list) else [content]
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in _TEXTS or not isinstance(part.get("text"), str):
            raise GatewayError(f"{where}: a part of the type {kind!r:.80}; the model reads texts alone")
        texts.append(part["text"])
    return "\n".join(texts)


def assistant(content: str, thoughts: str | None, calls: Sequence[Mapping[str, Any]]) -> Message:
    """Returns a message of the model, as `Action.message` is."""
    thinking = {} if thoughts is None else {"reasoning_content": thoughts}
    return {"role": "assistant", "content": content, **thinking, **({"tool_calls": list(calls)} if calls else {})}


def tool_call(fields: RequestFields, call_id: object, name: object, arguments: object, where: str) -> Mapping[str, Any]:
    """Returns a call of a tool as a client sends it back; arguments may be JSON."""
    try:
        read: Any = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        read = None
    if not isinstance(name, str) or not isinstance(call_id, str) or not isinstance(read, dict):
        raise GatewayError(f"{where}: a call of a tool has an id, a name, and arguments that are a JSON object")
    own = fields.call_ids.get(call_id, call_id)
    return {"type": "function", "id": own, "function": {"name": name, "arguments": read}}


def tool_answer(fields: RequestFields, call_id: object, content: object, where: str) -> Message:
    """Returns the answer of a tool as a message."""
    if not isinstance(call_id, str):
        raise GatewayError(f"{where}: the id of the call must be a text, not {call_id!r:.80}")
    return {"role": "tool", "tool_call_id": fields.call_ids.get(call_id, call_id), "content": text_of(content, where)}


def offered(name: object, description: object, parameters: object, where: str) -> Mapping[str, Any]:
    """Returns a tool for chat templates."""
    if not isinstance(name, str) or not isinstance(parameters, dict | None):
        raise GatewayError(f"{where}: a tool has a name, and a JSON schema of its arguments")
    schema: Any = parameters or {"type": "object", "properties": {}}
    told = {} if description is None else {"description": text_of(description, where)}
    return {"type": "function", "function": {"name": name, **told, "parameters": schema}}


def whole_chat(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Returns a chat that the model can answer."""
    chat = tuple(messages)
    if not chat or chat[-1]["role"] == "assistant":
        raise GatewayError("the last message must be of the user, the system or a tool: the model begins its answer")
    return chat
