"""Anthropic's Messages, as a gateway speaks them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

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
from megarl.environments.environment import ToolCall, assistant_message


def read_messages(fields: RequestFields) -> GatewayRequest:
    chat: list[Message] = []
    system = fields.remaining.pop("system", None)
    if system:
        chat.append({"role": "system", "content": text_of(system, "system")})
    for index, item in enumerate(fields.take_items("messages")):
        chat += _messages(fields, item, f"messages[{index}]")
    tools = fields.take_tools("custom", "input_schema")
    max_tokens = fields.take_count("max_tokens")
    if max_tokens is None:
        raise GatewayError("max_tokens is missing")
    return fields.request(messages=whole_chat(chat), tools=tools, max_tokens=max_tokens)


def _messages(fields: RequestFields, item: Json, where: str) -> Iterator[Message]:
    """Yields the messages of one with blocks: answers of tools, and what else is said, in their order."""
    role = item.get("role")
    content = item.get("content")
    blocks: list[Any] = content if isinstance(content, list) else [{"type": "text", "text": content}]
    if role not in ("user", "assistant") or not all(isinstance(block, dict) for block in blocks):
        rule = "the role must be user or assistant, the content a text or a list of blocks"
        raise GatewayError(f"{where}: {rule}")
    if role == "assistant":
        yield _assistant(fields, blocks, where)
        return
    texts: list[Any] = []
    for block in blocks:
        if block.get("type") != "tool_result":
            texts.append(block)
            continue
        if texts:
            yield {"role": "user", "content": text_of(texts, where)}
            texts = []
        yield fields.take_tool_answer(block.get("tool_use_id"), block.get("content"), where)
    if texts or not blocks:
        yield {"role": "user", "content": text_of(texts, where)}


def _assistant(fields: RequestFields, blocks: list[Any], where: str) -> Message:
    texts: list[Any] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block in blocks:
        if block.get("type") == "thinking":
            thoughts.append(text_of(block.get("thinking"), where))
        elif block.get("type") == "tool_use":
            calls.append(fields.take_tool_call(block, "id", "input", where))
        else:
            texts.append(block)
    thought = "\n".join(thoughts) if thoughts else None
    return assistant_message(text_of(texts, where), thought, calls)


def write_message(reply: GatewayReply) -> Json:
    action = reply.turns[0].action
    blocks: list[Json] = []
    if action.thoughts is not None:
        blocks.append({"type": "thinking", "thinking": action.thoughts, "signature": ""})
    if action.content or not action.tool_calls:
        blocks.append({"type": "text", "text": action.content})
    for call in action.tool_calls:
        arguments = dict(call.arguments)
        blocks.append({"type": "tool_use", "id": call.call_id, "name": call.name, "input": arguments})
    if not action.finished:
        reason = "max_tokens"
    elif action.tool_calls:
        reason = "tool_use"
    else:
        reason = "end_turn"
    return {
        "id": f"msg_{reply.request.digest}",
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": blocks,
        "stop_reason": reason,
        "stop_sequence": None,
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.sampled_tokens},
    }


def stream_message(reply: GatewayReply) -> Iterator[Json]:
    """Yields the events of the answer: a block has one delta."""
    whole = write_message(reply)
    usage = {**whole["usage"], "output_tokens": 0}
    begun = {**whole, "content": [], "stop_reason": None, "usage": usage}
    yield {"type": "message_start", "message": begun}
    for index, block in enumerate(whole["content"]):
        start, delta = _streamed(block)
        at = {"index": index}
        yield {"type": "content_block_start", **at, "content_block": start}
        yield {"type": "content_block_delta", **at, "delta": delta}
        yield {"type": "content_block_stop", **at}
    ending = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": ending, "usage": whole["usage"]}
    yield {"type": "message_stop"}


def _streamed(block: Json) -> tuple[Json, Json]:
    """Returns the start of a block, and the rest."""
    if block["type"] == "text":
        return {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
    if block["type"] == "thinking":
        return {**block, "thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
    return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
