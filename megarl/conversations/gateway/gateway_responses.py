"""OpenAI's Responses, as a gateway speaks them: what agents use of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megarl.conversations.gateway.gateway_request import (
    GatewayError,
    GatewayReply,
    GatewayRequest,
    RequestFields,
    assistant_message,
    text_of,
    whole_chat,
)
from megarl.data.tokenizer import Message


def read_response(fields: RequestFields) -> GatewayRequest:
    """Reads a request for a response to a whole chat."""
    instructions = fields.take("instructions", str)
    chat: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(fields.remaining.get("input"), str):
        chat.append({"role": "user", "content": fields.remaining.pop("input")})
    else:
        chat += _messages(fields, fields.take_items("input"))
    tools = fields.take_tools("function", "parameters")
    max_tokens = fields.take_count("max_output_tokens")
    return fields.request(messages=whole_chat(chat), tools=tools, max_tokens=max_tokens)


def _messages(fields: RequestFields, items: list[dict[str, Any]]) -> Iterator[Message]:
    """Yields messages; neighboring items that the model wrote are one."""
    written: list[dict[str, Any]] = []  # by the model
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


def _assistant(fields: RequestFields, items: list[dict[str, Any]], where: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Mapping[str, Any]] = []
    for item in items:
        if item.get("type") == "reasoning":
            thoughts.append(text_of(item.get("content") or item.get("summary"), where))
        elif item.get("type") == "function_call":
            call = (item.get("call_id"), item.get("name"), item.get("arguments"))
            calls.append(fields.take_tool_call(*call, where))
        else:
            texts.append(text_of(item.get("content"), where))
    return assistant_message("\n".join(texts), thoughts, calls)


def write_response(reply: GatewayReply) -> dict[str, Any]:
    """Returns the answer to a request for a response."""
    action = reply.turns[0].action
    status = "completed"
    details = None
    if not action.finished:
        status = "incomplete"
        details = {"reason": "max_output_tokens"}
    output: list[dict[str, Any]] = []
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


def stream_response(reply: GatewayReply) -> Iterator[dict[str, Any]]:
    """Yields the events of the answer: a text has one delta."""
    for number, event in enumerate(_events(write_response(reply))):
        yield {**event, "sequence_number": number}


def _events(whole: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
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


def _parts(item: Mapping[str, Any], at: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
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
