"""OpenAI's Chat Completions and Completions, as a gateway speaks them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megarl.conversations.gateway.gateway_request import (
    GatewayAnswer,
    GatewayError,
    GatewayReply,
    RequestFields,
    TurnAsk,
    assistant,
    offered,
    text_of,
    tool_answer,
    tool_call,
    whole_chat,
)
from megarl.data.tokenizer import Message

_NEUTRAL = {"stop": ([], ""), "logit_bias": ({},), "best_of": (1,), "echo": (False,), "suffix": ("",)}
_NEUTRAL_CHAT = {
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "functions": ([],),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
}
_FOR_OTHERS = ("user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
_MOST = ("max_completion_tokens", "max_tokens")


def read_chat(fields: RequestFields) -> TurnAsk:
    """Reads a request for chat completions."""
    messages = [_message(fields, item, f"messages[{i}]") for i, item in enumerate(fields.items("messages"))]
    tools: list[Mapping[str, Any]] = []
    for index, tool in enumerate(fields.items("tools")):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise GatewayError(f"tools[{index}]: only tools of the type function can be offered")
        described = (function.get("name"), function.get("description"), function.get("parameters"))
        tools.append(offered(*described, f"tools[{index}]"))
    fields.only({**_NEUTRAL_CHAT, "tool_choice": ("auto",) if tools else ("auto", "none"), "top_logprobs": (0,)})
    logprobs = fields.take("logprobs", bool, False)
    return _asked(fields, messages=whole_chat(messages), tools=tuple(tools), logprobs=logprobs)


def read_completion(fields: RequestFields) -> TurnAsk:
    """Reads a request for completions of a text or of token ids."""
    prompt: Any = fields.left.pop("prompt", None)
    if isinstance(prompt, list) and prompt and all(type(token) is int and 0 <= token < 1 << 31 for token in prompt):
        prompt = tuple(prompt)
    elif not isinstance(prompt, str):
        raise GatewayError("prompt must be a text or a list of token ids, of one prompt")
    logprobs = fields.take("logprobs", int)
    if logprobs:
        raise GatewayError(f"logprobs = {logprobs}: only those of the sampled tokens are known; it must be 0 or absent")
    return _asked(fields, prompt=prompt, logprobs=logprobs is not None)


def _asked(fields: RequestFields, **asked: Any) -> TurnAsk:
    most = fields.count(*_MOST)
    count = fields.several()
    stream = fields.take("stream", bool, False)
    with_ids = fields.take("return_token_ids", bool, False)
    options: dict[str, Any] = fields.take("stream_options", dict, {})
    fields.only(_NEUTRAL)
    fields.sampled()
    fields.drop(*_FOR_OTHERS)
    fields.end()
    usage = bool(options.get("include_usage"))
    return TurnAsk(most=most, count=count, stream=stream, with_ids=with_ids, with_usage=usage, **asked)


def _message(fields: RequestFields, item: Mapping[str, Any], where: str) -> Message:
    role = item.get("role")
    content = item.get("content")
    if role in ("system", "developer", "user"):
        name = {} if item.get("name") is None else {"name": text_of(item["name"], f"{where}.name")}
        return {"role": "user" if role == "user" else "system", "content": text_of(content, where), **name}
    if role == "tool":
        return tool_answer(fields, item.get("tool_call_id"), content, where)
    if role != "assistant":
        raise GatewayError(f"{where}.role = {role!r:.80}: it must be system, developer, user, assistant or tool")
    if item.get("audio") or item.get("function_call") or item.get("refusal"):
        raise GatewayError(f"{where}: audio, function_call and refusal are nothing that the model writes")
    calls: list[Mapping[str, Any]] = []
    called = item.get("tool_calls") or []
    for call in called if isinstance(called, list) else [called]:
        function = call.get("function") if isinstance(call, dict) else None
        function = function if isinstance(function, dict) else {}
        call_id = call.get("id") if isinstance(call, dict) else None
        calls.append(tool_call(fields, call_id, function.get("name"), function.get("arguments"), where))
    thoughts = item.get("reasoning_content", item.get("reasoning"))
    return assistant(text_of(content, where), None if thoughts is None else text_of(thoughts, where), calls)


def _message_of(answer: GatewayAnswer) -> dict[str, Any]:
    calls = [
        {
            "id": call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for call in answer.calls
    ]
    thoughts = answer.turn.action.thoughts
    return {
        "role": "assistant",
        "content": answer.turn.action.content or (None if calls else ""),
        **({} if thoughts is None else {"reasoning_content": thoughts}),
        **({"tool_calls": calls} if calls else {}),
    }


def _finish_reason(answer: GatewayAnswer) -> str:
    if not answer.turn.action.finished:
        return "length"
    return "tool_calls" if answer.calls else "stop"


def _choice(reply: GatewayReply, index: int, answer: GatewayAnswer, body: Mapping[str, Any]) -> dict[str, Any]:
    ids = {"token_ids": list(answer.turn.action.token_ids)} if reply.ask.with_ids else {}
    return {"index": index, **body, "logprobs": None, "finish_reason": _finish_reason(answer), **ids}


def _head(reply: GatewayReply, kind: str, name: str) -> dict[str, Any]:
    return {"id": f"{name}-{reply.reply_id}", "object": kind, "created": reply.created, "model": reply.model}


def _usage(reply: GatewayReply) -> dict[str, int]:
    read = reply.prompt_tokens
    sampled = reply.sampled_tokens
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}


def _prompt_ids(reply: GatewayReply) -> dict[str, list[int]]:
    return {"prompt_token_ids": list(reply.answers[0].turn.prompt)} if reply.ask.with_ids else {}


def _token_logprobs(reply: GatewayReply, answer: GatewayAnswer) -> dict[str, Any]:
    """Returns all sampled tokens, those of thoughts, calls and the end included."""
    tokens = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(_texts(reply, answer), answer.turn.logprobs, strict=True)
    ]
    return {"content": tokens, "refusal": None}


def _texts(reply: GatewayReply, answer: GatewayAnswer) -> list[str]:
    return [reply.decode([token]) for token in answer.turn.action.token_ids]


def write_chat(reply: GatewayReply) -> dict[str, Any]:
    """Returns the answer to a request for chat completions."""
    choices: list[dict[str, Any]] = []
    for index, answer in enumerate(reply.answers):
        choice = _choice(reply, index, answer, {"message": _message_of(answer)})
        choices.append({**choice, "logprobs": _token_logprobs(reply, answer)} if reply.ask.logprobs else choice)
    head = _head(reply, "chat.completion", "chatcmpl")
    return {**head, "choices": choices, "usage": _usage(reply), **_prompt_ids(reply)}


def stream_chat(reply: GatewayReply) -> Iterator[tuple[None, dict[str, Any]]]:
    """Yields the chunks of the answer: a part of each message has one."""
    head = _head(reply, "chat.completion.chunk", "chatcmpl")
    for index, answer in enumerate(reply.answers):
        message = _message_of(answer)
        calls = [{"index": number, **call} for number, call in enumerate(message.pop("tool_calls", ()))]
        parts: list[dict[str, Any]] = [{name: value} for name, value in message.items() if name != "role" and value]
        for number, delta in enumerate([*parts, *({"tool_calls": [call]} for call in calls)] or [{"content": ""}]):
            choice = {"index": index, "delta": {"role": "assistant", **delta}, "finish_reason": None}
            choice["logprobs"] = _token_logprobs(reply, answer) if reply.ask.logprobs and not number else None
            yield None, {**head, **_prompt_ids(reply), "choices": [choice]}
        yield None, {**head, "choices": [_choice(reply, index, answer, {"delta": {}})]}
    if reply.ask.with_usage:
        yield None, {**head, "choices": [], "usage": _usage(reply)}


def write_completion(reply: GatewayReply) -> dict[str, Any]:
    """Returns the answer to a request for completions."""
    choices: list[dict[str, Any]] = []
    for index, answer in enumerate(reply.answers):
        choice = _choice(reply, index, answer, {"text": answer.turn.action.text})
        if choice["finish_reason"] == "tool_calls":
            choice["finish_reason"] = "stop"
        if reply.ask.logprobs:
            texts = _texts(reply, answer)
            logprobs = list(answer.turn.logprobs)
            offsets = [sum(map(len, texts[:i])) for i in range(len(texts))]
            known = {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}
            choice["logprobs"] = known
        choices.append({**choice, **_prompt_ids(reply)})
    return {**_head(reply, "text_completion", "cmpl"), "choices": choices, "usage": _usage(reply)}


def stream_completion(reply: GatewayReply) -> Iterator[tuple[None, dict[str, Any]]]:
    """Yields the chunks of the answer, one per choice."""
    whole = write_completion(reply)
    usage = whole.pop("usage")
    for choice in whole["choices"]:
        yield None, {**whole, "choices": [choice]}
    if reply.ask.with_usage:
        yield None, {**whole, "choices": [], "usage": usage}
