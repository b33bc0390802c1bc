"""OpenAI's Chat Completions, Completions and Responses, as far as agents use them.

A protocol has a function that reads requests, one that writes the answer, and one that streams it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from megarl.conversations.chat_session import SessionTurn
from megarl.conversations.gateway.gateway_request import (
    GatewayError,
    GatewayReply,
    GatewayRequest,
    Json,
    RequestFields,
    text_of,
    whole_chat,
)
from megarl.data.tokenizer import Message
from megarl.environments.environment import Action, ToolCall, assistant_message

_MAX_ANSWERS = 128


def read_chat(fields: RequestFields) -> GatewayRequest:
    messages: list[Message] = []
    for index, item in enumerate(fields.take_items("messages")):
        messages.append(_message(fields, item, f"messages[{index}]"))
    tools = fields.take_tools("function", "parameters")
    logprobs = fields.take("logprobs", bool, False)
    return _read_common(fields, messages=whole_chat(messages), tools=tools, logprobs=logprobs)


def read_completion(fields: RequestFields) -> GatewayRequest:
    prompt: Any = fields.remaining.pop("prompt", None)
    if isinstance(prompt, list) and prompt and all(map(_is_token_id, prompt)):
        prompt = tuple(prompt)
    elif not isinstance(prompt, str):
        raise GatewayError("prompt must be a text or a list of token ids, of one prompt")
    logprobs = fields.take("logprobs", int)
    if logprobs:
        rule = "only those of the sampled tokens are known; it must be 0 or absent"
        raise GatewayError(f"logprobs = {logprobs}: {rule}")
    return _read_common(fields, prompt=prompt, logprobs=logprobs is not None)


def _is_token_id(token: object) -> bool:
    return type(token) is int and 0 <= token < 1 << 31


def _read_common(fields: RequestFields, **known: Any) -> GatewayRequest:
    """Reads the fields that both endpoints have."""
    limits = [fields.take_count(name) for name in ("max_completion_tokens", "max_tokens")]
    count = fields.take_count("n") or 1
    if count > _MAX_ANSWERS:
        raise GatewayError(f"n = {count}: at most {_MAX_ANSWERS}")
    with_ids = fields.take("return_token_ids", bool, False)
    options: Json = fields.take("stream_options", dict, {})
    return fields.request(
        max_tokens=limits[0] or limits[1],
        count=count,
        with_ids=with_ids,
        with_usage=bool(options.get("include_usage")),
        **known,
    )


def _message(fields: RequestFields, item: Json, where: str) -> Message:
    role = item.get("role")
    content = item.get("content")
    if role in ("system", "developer", "user"):
        message = {"role": "user" if role == "user" else "system", "content": text_of(content, where)}
        if item.get("name") is not None:
            message["name"] = text_of(item["name"], f"{where}.name")
        return message
    if role == "tool":
        return fields.take_tool_answer(item.get("tool_call_id"), content, where)
    if role != "assistant":
        roles = "system, developer, user, assistant or tool"
        raise GatewayError(f"{where}.role = {role!r:.80}: it must be {roles}")
    if item.get("audio") or item.get("function_call") or item.get("refusal"):
        raise GatewayError(f"{where}: audio, function_call and refusal are nothing that the model writes")
    calls: list[ToolCall] = []
    called: Any = item.get("tool_calls") or []
    for call in called if isinstance(called, list) else [called]:
        outer: Json = call if isinstance(call, dict) else {}
        function: Any = outer.get("function")
        inner: Json = function if isinstance(function, dict) else {}
        calls.append(fields.take_tool_call({**inner, "id": outer.get("id")}, "id", "arguments", where))
    thoughts = item.get("reasoning_content", item.get("reasoning"))
    if thoughts is not None:
        thoughts = text_of(thoughts, where)
    return assistant_message(text_of(content, where), thoughts, calls)


def _answer_message(action: Action) -> Json:
    message: Json = {"role": "assistant", "content": action.content}
    if action.thoughts is not None:
        message["reasoning_content"] = action.thoughts
    if action.tool_calls:
        message["content"] = action.content or None
        message["tool_calls"] = calls = []
        for call in action.tool_calls:
            function = {"name": call.name, "arguments": json.dumps(call.arguments)}
            calls.append({"id": call.call_id, "type": "function", "function": function})
    return message


def _finish_reason(action: Action) -> str:
    if not action.finished:
        return "length"
    return "tool_calls" if action.tool_calls else "stop"


def _choice(reply: GatewayReply, index: int, reason: str, **body: Any) -> Json:
    choice = {"index": index, "logprobs": None, **body, "finish_reason": reason}
    if reply.request.with_ids:
        choice["token_ids"] = list(reply.turns[index].action.token_ids)
    return choice


def _head(reply: GatewayReply, kind: str, name: str) -> Json:
    return {"id": f"{name}-{reply.request.digest}", "object": kind, "created": reply.created, "model": reply.model}


def _usage(reply: GatewayReply) -> dict[str, int]:
    read = reply.prompt_tokens
    sampled = reply.sampled_tokens
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}


def _prompt_ids(reply: GatewayReply) -> dict[str, list[int]]:
    if not reply.request.with_ids:
        return {}
    return {"prompt_token_ids": list(reply.turns[0].prompt)}


def _token_logprobs(reply: GatewayReply, turn: SessionTurn) -> Json | None:
    """Returns all sampled tokens, those of thoughts, calls and the end included, if they are requested."""
    if not reply.request.logprobs:
        return None
    tokens: list[Json] = []
    for text, logprob in zip(_texts(reply, turn), turn.logprobs, strict=True):
        encoded = list(text.encode())
        tokens.append({"token": text, "logprob": logprob, "bytes": encoded, "top_logprobs": []})
    return {"content": tokens, "refusal": None}


def _texts(reply: GatewayReply, turn: SessionTurn) -> list[str]:
    return [reply.decode([token]) for token in turn.action.token_ids]


def write_chat(reply: GatewayReply) -> Json:
    choices: list[Json] = []
    for index, turn in enumerate(reply.turns):
        body = {"message": _answer_message(turn.action), "logprobs": _token_logprobs(reply, turn)}
        choices.append(_choice(reply, index, _finish_reason(turn.action), **body))
    head = _head(reply, "chat.completion", "chatcmpl")
    return {**head, "choices": choices, "usage": _usage(reply), **_prompt_ids(reply)}


def stream_chat(reply: GatewayReply) -> Iterator[Json]:
    """Yields the chunks of the answer: a part of each message has one."""
    head = _head(reply, "chat.completion.chunk", "chatcmpl")
    for index, turn in enumerate(reply.turns):
        first, *others = _message_parts(turn.action)
        choice = {"index": index, "finish_reason": None, "logprobs": _token_logprobs(reply, turn)}
        # The first part alone has the role: OpenAI's client joins the roles of all parts to one word.
        yield {**head, **_prompt_ids(reply), "choices": [{**choice, "delta": {"role": "assistant", **first}}]}
        for part in others:
            yield {**head, **_prompt_ids(reply), "choices": [{**choice, "logprobs": None, "delta": part}]}
        yield {**head, "choices": [_choice(reply, index, _finish_reason(turn.action), delta={})]}
    if reply.request.with_usage:
        yield {**head, "choices": [], "usage": _usage(reply)}


def _message_parts(action: Action) -> list[Json]:
    message = _answer_message(action)
    parts: list[Json] = []
    for name in ("content", "reasoning_content"):
        if message.get(name):
            parts.append({name: message[name]})
    for number, call in enumerate(message.get("tool_calls", ())):
        parts.append({"tool_calls": [{"index": number, **call}]})
    return parts or [{"content": ""}]


def write_completion(reply: GatewayReply) -> Json:
    choices: list[Json] = []
    for index, turn in enumerate(reply.turns):
        reason = "stop" if turn.action.finished else "length"
        logprobs = None
        if reply.request.logprobs:
            texts = _texts(reply, turn)
            logprobs = {
                "tokens": texts,
                "token_logprobs": list(turn.logprobs),
                "top_logprobs": None,
                "text_offset": list(accumulate(map(len, texts[:-1]), initial=0)),
            }
        choice = _choice(reply, index, reason, text=turn.action.text, logprobs=logprobs)
        choices.append({**choice, **_prompt_ids(reply)})
    return {**_head(reply, "text_completion", "cmpl"), "choices": choices, "usage": _usage(reply)}


def stream_completion(reply: GatewayReply) -> Iterator[Json]:
    """Yields the chunks of the answer, one per choice."""
    whole = write_completion(reply)
    usage = whole.pop("usage")
    for choice in whole["choices"]:
        yield {**whole, "choices": [choice]}
    if reply.request.with_usage:
        yield {**whole, "choices": [], "usage": usage}


def read_response(fields: RequestFields) -> GatewayRequest:
    instructions = fields.take("instructions", str)
    chat: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(fields.remaining.get("input"), str):
        chat.append({"role": "user", "content": fields.remaining.pop("input")})
    else:
        chat += _messages(fields, fields.take_items("input"))
    tools = fields.take_tools("function", "parameters")
    max_tokens = fields.take_count("max_output_tokens")
    return fields.request(messages=whole_chat(chat), tools=tools, max_tokens=max_tokens)


def _messages(fields: RequestFields, items: list[Json]) -> Iterator[Message]:
    """Yields messages; neighboring items that the model wrote are one."""
    written: list[Json] = []  # by the model
    for index, item in enumerate(items):
        kind = item.get("type", "message")
        role = item.get("role")
        where = f"input[{index}]"
        if kind in ("reasoning", "function_call") or (kind == "message" and role == "assistant"):
            written.append(item)
            continue
        if written:
            yield _assistant(fields, written, where)
            written = []
        if kind == "function_call_output":
            yield fields.take_tool_answer(item.get("call_id"), item.get("output"), where)
        elif kind == "message" and role in ("system", "developer", "user"):
            role = "user" if role == "user" else "system"
            yield {"role": role, "content": text_of(item.get("content"), where)}
        else:
            raise GatewayError(f"{where}: an item of the type {kind!r:.80}, with the role {role!r:.80}")
    if written:
        yield _assistant(fields, written, "input")


def _assistant(fields: RequestFields, items: list[Json], where: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for item in items:
        if item.get("type") == "reasoning":
            thoughts.append(text_of(item.get("content") or item.get("summary"), where))
        elif item.get("type") == "function_call":
            calls.append(fields.take_tool_call(item, "call_id", "arguments", where))
        else:
            texts.append(text_of(item.get("content"), where))
    thought = "\n".join(thoughts) if thoughts else None
    return assistant_message("\n".join(texts), thought, calls)


def write_response(reply: GatewayReply) -> Json:
    action = reply.turns[0].action
    status = "completed"
    details = None
    if not action.finished:
        status = "incomplete"
        details = {"reason": "max_output_tokens"}
    output: list[Json] = []
    if action.thoughts is not None:
        content = [{"type": "reasoning_text", "text": action.thoughts}]
        item = {"type": "reasoning", "id": f"rs_{reply.request.digest}", "summary": [], "content": content}
        output.append(item)
    if action.content or not action.tool_calls:
        part = {"type": "output_text", "text": action.content, "annotations": [], "logprobs": []}
        item = {"type": "message", "id": f"msg_{reply.request.digest}", "role": "assistant"}
        output.append({**item, "status": status, "content": [part]})
    for call in action.tool_calls:
        item = {"type": "function_call", "id": f"fc_{call.call_id}", "call_id": call.call_id}
        item |= {"name": call.name, "arguments": json.dumps(call.arguments), "status": "completed"}
        output.append(item)
    tools = [{"type": "function", "strict": False, **tool["function"]} for tool in reply.request.tools]
    return {
        "id": f"resp_{reply.request.digest}",
        "object": "response",
        "created_at": reply.created,
        "status": status,
        "model": reply.model,
        "output": output,
        "error": None,
        "instructions": None,
        "metadata": {},
        "incomplete_details": details,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "temperature": None,
        "top_p": None,
        "tools": tools,
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "output_tokens": reply.sampled_tokens,
            "total_tokens": reply.prompt_tokens + reply.sampled_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


def stream_response(reply: GatewayReply) -> Iterator[Json]:
    """Yields the events of the answer: a text has one delta."""
    for number, event in enumerate(_events(write_response(reply))):
        yield {**event, "sequence_number": number}


def _events(whole: Json) -> Iterator[Json]:
    begun = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(whole["output"]):
        at = {"output_index": index}
        empty = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield {"type": "response.output_item.added", **at, "item": {**item, **empty, "status": "in_progress"}}
        yield from _parts(item, {**at, "item_id": item["id"]})
        yield {"type": "response.output_item.done", **at, "item": item}
    yield {"type": f"response.{whole['status']}", "response": whole}


def _parts(item: Json, at: Json) -> Iterator[Json]:
    if item["type"] == "function_call":
        yield {"type": "response.function_call_arguments.delta", **at, "delta": item["arguments"]}
        done = {"arguments": item["arguments"], "name": item["name"]}
        yield {"type": "response.function_call_arguments.done", **at, **done}
        return
    part = item["content"][0]
    at = {**at, "content_index": 0}
    if item["type"] == "reasoning":
        yield {"type": "response.reasoning_text.delta", **at, "delta": part["text"]}
        yield {"type": "response.reasoning_text.done", **at, "text": part["text"]}
        return
    yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
    yield {"type": "response.output_text.delta", **at, "delta": part["text"], "logprobs": []}
    yield {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []}
    yield {"type": "response.content_part.done", **at, "part": part}
