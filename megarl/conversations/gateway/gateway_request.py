"""What clients ask a gateway for, in any protocol; what cannot be honored exactly is refused in words."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megarl.conversations.chat_session import SessionTurn
from megarl.data.tokenizer import Message
from megarl.environments.environment import ToolCall

_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "background": (False,),
    "best_of": (1,),
    "echo": (False,),
    "functions": ([],),
    "include": ([],),
    "logit_bias": ({},),
    "mcp_servers": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "reasoning": ({},),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default", "standard_only"),
    "stop": ([], ""),
    "stop_sequences": ([],),
    "suffix": ("",),
    "text": ({}, {"format": {"type": "text"}}),
    "thinking": ({"type": "disabled"},),
    "tool_choice": ("auto", {"type": "auto"}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
}
"""Values that change nothing, of fields that cannot be honored otherwise."""
_IGNORED = (
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "store",
    "stream_options",
    "user",
)
_TEXTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text")


Json = dict[str, Any]
"""An object of JSON."""


class GatewayError(Exception):
    """A request that is not honored; the message says why."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The run's sampling; `override`: also for requests of other sampling, which are otherwise refused."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    override: bool = False


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """What a run decides for a gateway.

    Args:
        file: file for the address and the run's key, which a harness elsewhere reads.
        rewarded: whether something other than a harness gives rewards.
    """

    file: str
    sampling: Sampling
    rewarded: bool


@dataclass(frozen=True, kw_only=True)
class GatewayRequest:
    """A request for turns.

    Args:
        messages: the whole chat; empty where `prompt` is a text or token ids.
        max_tokens: limit of a turn's tokens.
        count: number of turns that answer the same chat, each on a branch.
        with_ids: whether the answer has token ids.
        with_usage: whether the stream ends with the numbers of tokens.
    """

    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    count: int = 1
    logprobs: bool = False
    with_ids: bool = False
    stream: bool = False
    with_usage: bool = False

    @cached_property
    def digest(self) -> str:
        """Identifies the request: the same turns answer a repeated one."""
        content = [self.messages, self.prompt, self.tools, self.max_tokens, self.count]
        text = json.dumps(content, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]


@dataclass(frozen=True, kw_only=True)
class GatewayReply:
    """The turns that answer a request, with the calls of tools that can be read."""

    request: GatewayRequest
    turns: Sequence[SessionTurn]
    created: int  # Unix time, seconds
    model: str
    decode: Callable[[Sequence[int]], str]

    @property
    def prompt_tokens(self) -> int:
        return len(self.turns[0].prompt)

    @property
    def sampled_tokens(self) -> int:
        return sum(len(turn.action.token_ids) for turn in self.turns)


@dataclass
class RequestFields:
    """The fields of a request, taken one by one; those that remain are refused. Null is like absent."""

    remaining: Json
    sampling: Sampling
    model: str
    call_ids: Mapping[str, str]  # the model's ids of its tool calls, by those that the client got

    def __post_init__(self) -> None:
        self.remaining = {name: value for name, value in self.remaining.items() if value is not None}
        model = self.take("model", str, self.model)
        if model != self.model:
            alone = f"this session has {self.model!r} alone (environment.args.model)"
            raise GatewayError(f"model = {model!r}: {alone}", 404)

    def take(self, name: str, kind: type, default: Any = None) -> Any:
        """Returns a field of a type."""
        value = self.remaining.pop(name, default)
        wrong = not isinstance(value, kind) or (kind is int and isinstance(value, bool))
        if value is not default and wrong:
            raise GatewayError(f"{name} must be of the type {kind.__name__}, not {value!r:.80}")
        return value

    def take_count(self, name: str) -> int | None:
        """Returns a field that is a positive number."""
        value = self.take(name, int)
        if value is not None and value < 1:
            raise GatewayError(f"{name} = {value}: at least 1")
        return value

    def take_items(self, name: str) -> list[Json]:
        items: list[Any] = self.take(name, list, [])
        for index, item in enumerate(items):
            if not isinstance(item, dict):
                raise GatewayError(f"{name}[{index}] must be an object, not {item!r:.80}")
        return items

    def take_tools(self, kind: str, parameters: str) -> tuple[Mapping[str, Any], ...]:
        """Returns the offered tools, all of one type; `parameters` is the protocol's key of the arguments' schema."""
        tools: list[Mapping[str, Any]] = []
        for index, tool in enumerate(self.take_items("tools")):
            where = f"tools[{index}]"
            found = tool.get("type", "custom")
            if found != kind:
                raise GatewayError(f"{where}.type = {found!r:.80}: only tools of the type {kind} can be offered")
            function: Any = tool.get("function", tool)  # Chat Completions has the rest in it
            if not isinstance(function, dict):
                raise GatewayError(f"{where}.function must be an object, not {function!r:.80}")
            name = function.get("name")
            schema = function.get(parameters)
            if not isinstance(name, str) or not isinstance(schema, dict | None):
                rule = "a tool has a name, and a JSON schema of its arguments"
                raise GatewayError(f"{where}: {rule}")
            described: Json = {"name": name}
            if function.get("description") is not None:
                described["description"] = text_of(function["description"], where)
            described["parameters"] = schema or {"type": "object", "properties": {}}
            tools.append({"type": "function", "function": described})
        if not tools and self.remaining.get("tool_choice") == "none":
            del self.remaining["tool_choice"]
        return tuple(tools)

    def request(self, **known: Any) -> GatewayRequest:
        """Returns a request; refuses sampling other than the run's, and fields that remain."""
        stream = self.take("stream", bool, False)
        run = {
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "top_k": self.sampling.top_k,
        }
        others = {"seed": None, "presence_penalty": 0, "frequency_penalty": 0}
        for name, value in {**run, **others}.items():
            wanted = self.remaining.pop(name, None)
            if wanted is not None and wanted != value and not self.sampling.override:
                how = f"with {value}" if name in run else "otherwise"
                fix = "leave it out, or set environment.args.override_sampling: true, which ignores it"
                raise GatewayError(f"{name} = {wanted!r:.80}: the run samples {how}; {fix}")
        refused: list[str] = []
        for name, value in self.remaining.items():
            if name not in _IGNORED and value not in _NEUTRAL.get(name, ()):
                refused.append(f"{name} = {value!r:.80}")
        if refused:
            why = "this endpoint cannot honor that; leave it out"
            raise GatewayError(f"{', '.join(refused)}: {why}")
        return GatewayRequest(stream=stream, **known)

    def take_tool_call(self, call: Json, call_key: str, arguments_key: str, where: str) -> ToolCall:
        """Returns a call of a tool as a client sends it back; arguments may be JSON."""
        call_id: Any = call.get(call_key)
        name: Any = call.get("name")
        arguments: Any = call.get(arguments_key)
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                arguments = None
        if not isinstance(name, str) or not isinstance(call_id, str) or not isinstance(arguments, dict):
            rule = "a call of a tool has an id, a name, and arguments that are a JSON object"
            raise GatewayError(f"{where}: {rule}")
        return ToolCall(name=name, arguments=arguments, call_id=self.call_ids.get(call_id, call_id))

    def take_tool_answer(self, call_id: object, content: object, where: str) -> Message:
        if not isinstance(call_id, str):
            raise GatewayError(f"{where}: the id of the call must be a text, not {call_id!r:.80}")
        text = text_of(content, where)
        return {"role": "tool", "tool_call_id": self.call_ids.get(call_id, call_id), "content": text}


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


def whole_chat(chat: Sequence[Message]) -> tuple[Message, ...]:
    """Returns a chat that the model can answer."""
    if not chat or chat[-1]["role"] == "assistant":
        rule = "must be of the user, the system or a tool: the model begins its answer"
        raise GatewayError(f"the last message {rule}")
    return tuple(chat)
