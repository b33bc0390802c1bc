"""Families of chats that the package `renderers` knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, Final

from megarl.conversations.tool_calls import Schemas, broken_call
from megarl.data.tokenizer import Message, Tokenizer
from megarl.environments.environment import ToolCall, assistant_message

_USER: Final[Message] = {"role": "user", "content": "1 + 1?"}
_TOOL: Final[Mapping[str, Any]] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
_ADD: Final = ToolCall(name="add", arguments={"a": 1}, call_id="call_0")
_RESULT: Final = _ADD.answer("2")
_ANSWER: Final = assistant_message("2\n", None, ())
_CHATS: Final[Sequence[tuple[Sequence[Message], Schemas]]] = (
    ([_USER], ()),
    ([{"role": "system", "content": "s"}, _USER, _ANSWER, _USER], ()),
    ([_USER, assistant_message("2\n", "t", ()), _USER], ()),
    ([_USER], [_TOOL]),
    ([_USER, assistant_message("", None, [_ADD]), _RESULT], [_TOOL]),
    ([_USER, assistant_message("", "t", [_ADD]), _RESULT], [_TOOL]),
    ([_USER, assistant_message("c", "t", [_ADD]), _RESULT, _ANSWER, _USER], [_TOOL]),
)
"""A family is known if it writes all of these like the template; those that the template refuses say nothing."""


def find_family(tokenizer: Tokenizer, arguments: Mapping[str, Any]) -> Any:
    """Returns the family that writes our probe chats like the chat template; None without one."""
    if not tokenizer.has_chat_template or find_spec("renderers") is None:
        return None
    import renderers  # pyright: ignore[reportMissingImports]

    for name in sorted(set(renderers.base.MODEL_RENDERER_MAP.values())):
        with suppress(Exception):  # it needs tokens that the tokenizer lacks, or does not read the arguments
            config = type(renderers.config_from_name(name))(thinking_retention="all")
            kwargs = dict(arguments)
            family = renderers.create_renderer(tokenizer.hf, config, chat_template_kwargs=kwargs)
            if all(_agree(tokenizer, arguments, family, chat, tools) for chat, tools in _CHATS):
                return family
    return None


def _agree(tokenizer: Tokenizer, arguments: Mapping[str, Any], family: Any, chat: Any, tools: Any) -> bool:
    try:
        text = tokenizer.written(chat, tools or None, arguments)
    except Exception:  # whatever the expressions of a template raise
        return len(chat) > 1
    messages = [dict(message) for message in chat]
    ids = family.render_ids(messages, tools=tool_specs(tools), add_generation_prompt=True)
    return list(ids) == tokenizer.continuation(text)


def tool_specs(tools: Schemas) -> Any:
    return [dict(tool) for tool in tools] or None


def family_call(call: Any, index: int) -> ToolCall:
    if call.status != "ok" or not isinstance(call.arguments, dict):
        return broken_call(call.status, call.raw, index)
    return ToolCall(name=call.name, arguments=call.arguments, call_id=call.id or f"call_{index}")
