"""Chats of the model families that the package `renderers` knows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Final, Literal

from megarl.conversations.chat import TemplateRenderer
from megarl.conversations.tool_calls import Schemas
from megarl.data.tokenizer import Message, Tokenizer
from megarl.environments.environment import Action, ToolCall


def find_renderer(
    tokenizer: Tokenizer,
    arguments: Mapping[str, Any],
    *,
    ends: Collection[int] = (),
    history: Literal["template", "sampled"] = "template",
    context: int | None = None,
) -> ChatRenderer:
    """Returns what writes and reads the chats of a tokenizer.

    That is the chat template; plus a `renderers` family if it renders our probe chats identically
    and adds tool parsing or sampled history.
    """
    template = TemplateRenderer(tokenizer, arguments, ends=ends, history=history, context=context)
    if not tokenizer.has_chat_template or find_spec("renderers") is None:
        return template
    if template.reads_calls and history == "template":
        return template
    family = _find_family(tokenizer, arguments)
    if family is None:
        return template
    return FamilyRenderer(template, family, bridges=history == "sampled")


class FamilyRenderer:
    """A chat template, and a family of the package `renderers` where the template alone does not suffice.

    Args:
        bridges: whether the family's `bridge_to_next_turn` gives what follows a turn where the
            template proves nothing; a turn stays as it was sampled.
    """

    def __init__(self, template: TemplateRenderer, family: Any, *, bridges: bool) -> None:
        self._template = template
        self._family = family
        self._bridges = bridges

    def begin(self, messages: Sequence[Message] | str, tools: Schemas) -> list[int]:
        return self._template.prompt(messages, tools)

    def read(self, token_ids: Sequence[int], finished: bool, *, prompt: Sequence[int], tools: Schemas) -> Action:
        action = self._template.read(token_ids, finished, prompt=prompt, tools=tools)
        if self._template.reads_calls:
            return action
        with _as_value_error("read a turn"):
            parsed = self._family.parse_response(list(token_ids), tools=_specs(tools), prompt_ids=list(prompt))
        calls: list[ToolCall] = []
        if tools:
            calls = [_call(call, index) for index, call in enumerate(parsed.tool_calls)]
        return replace(
            action,
            content=parsed.content,
            thoughts=parsed.reasoning_content,
            tool_calls=tuple(calls),
        )

    def follow(
        self,
        before: Sequence[Message],
        action: Action,
        messages: Sequence[Message] | str,
        *,
        prompt: Sequence[int],
        tools: Schemas,
    ) -> list[int] | None:
        proved = self._template.follow(before, action, messages, prompt=prompt, tools=tools)
        if proved is not None or isinstance(messages, str) or not action.finished or not self._bridges:
            return proved
        known = [*prompt, *action.token_ids]
        new = [dict(message) for message in messages]
        with _as_value_error("continue a turn"):
            bridge = self._family.bridge_to_next_turn(list(prompt), list(action.token_ids), new, tools=_specs(tools))
        if bridge is None:
            return None
        ids = list(bridge.token_ids)
        return ids[len(known) :] if ids[: len(known)] == known else None


ChatRenderer = TemplateRenderer | FamilyRenderer

_USER: Final[Message] = {"role": "user", "content": "1 + 1?"}
_TOOL: Final[Mapping[str, Any]] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
_ADD: Final[Mapping[str, Any]] = {"name": "add", "arguments": {"a": 1}}
_CALL: Final[Message] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "id": "call_0", "function": _ADD}],
}
_RESULT: Final[Message] = {"role": "tool", "tool_call_id": "call_0", "name": "add", "content": "2"}
_ANSWER: Final[Message] = {"role": "assistant", "content": "2\n"}
_CHATS: Final[Sequence[tuple[Sequence[Message], Schemas]]] = (
    ([_USER], ()),
    ([{"role": "system", "content": "s"}, _USER, _ANSWER, _USER], ()),
    ([_USER, {**_ANSWER, "reasoning_content": "t"}, _USER], ()),
    ([_USER], [_TOOL]),
    ([_USER, _CALL, _RESULT], [_TOOL]),
    ([_USER, {**_CALL, "reasoning_content": "t"}, _RESULT], [_TOOL]),
    ([_USER, {**_CALL, "reasoning_content": "t", "content": "c"}, _RESULT, _ANSWER, _USER], [_TOOL]),
)
"""A family is known if it writes all of these like the template; those that the template refuses say nothing."""


def _find_family(tokenizer: Tokenizer, arguments: Mapping[str, Any]) -> Any:
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
    ids = family.render_ids(messages, tools=_specs(tools), add_generation_prompt=True)
    return list(ids) == tokenizer.continuation(text)


@contextmanager
def _as_value_error(what: str) -> Iterator[None]:
    """Raises ValueError, which fails a conversation, for whatever the package raises."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"the package renderers cannot {what}: {error}") from error


def _specs(tools: Schemas) -> Any:
    return [dict(tool) for tool in tools] or None


def _call(call: Any, index: int) -> ToolCall:
    if call.status != "ok" or not isinstance(call.arguments, dict):
        problem = f"not a call of a tool: {call.status}: {call.raw}"
        return ToolCall(name="", call_id=f"call_{index}", problem=problem)
    return ToolCall(name=call.name, arguments=call.arguments, call_id=call.id or f"call_{index}")
