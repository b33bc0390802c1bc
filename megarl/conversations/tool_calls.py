"""Calls of tools as chat templates write them: which format a template has, and how a turn is read in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from megarl.data.tokenizer import Message
from megarl.environments.environment import ToolCall, assistant_message

Schemas = Sequence[Mapping[str, Any]]
"""Descriptions of tools, as chat templates get them."""
Read = tuple[str, tuple[ToolCall, ...]]
"""The content of a turn, and its calls.

The content is the text without the calls that can be read, and without the line break before the
first. A call that cannot be read stays in it as the model wrote it.
"""
Reader = Callable[[str, Schemas], Read]

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_TAG = "<|python_tag|>"
_BARE = re.compile(r'\{\s*("type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"[^"]*"\s*,\s*"parameters"\s*:')
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_FUNCTION_END = re.compile(r"\s*</function>")
_PYTHON: Final[Mapping[str, Any]] = {"True": True, "False": False, "None": None}
"""What templates write for values of JSON that they turn into text."""


def read_json_blocks(text: str, tools: Schemas) -> Read:
    """Reads <tool_call>{"name": ..., "arguments": {...}}</tool_call>, of Hermes, Qwen 2.5 and Qwen 3."""
    del tools
    return _read_blocks(text, _json_block)


def read_xml_blocks(text: str, tools: Schemas) -> Read:
    """Reads <tool_call><function=...><parameter=...>...</tool_call>, of Qwen3-Coder and Qwen 3.5.

    A value is JSON where the tool's schema says that it is no text; one that is no JSON then stays
    text.
    """
    return _read_blocks(text, lambda rest: _xml_block(rest, tools))


def read_bare_json(text: str, tools: Schemas) -> Read:
    """Reads {"name": ..., "parameters": {...}}, of Llama 3: all of the turn, after <|python_tag|> or without.

    Several calls have semicolons between them. Other JSON is content.
    """
    del tools
    rest = text.strip().removeprefix(_TAG).lstrip()
    calls = list[ToolCall]()
    if not text.lstrip().startswith(_TAG) and _BARE.match(rest) is None:
        return text, ()
    try:
        while rest:
            value, end = json.JSONDecoder().raw_decode(rest)
            name, arguments = _call(value, "parameters")
            calls.append(ToolCall(name=name, arguments=arguments, call_id=f"call_{len(calls)}"))
            rest = rest[end:].lstrip().removeprefix(";").lstrip()
    except (ValueError, RecursionError) as error:
        return text, (broken_call(str(error), rest, 0),)
    return "", tuple(calls)


_PROBE_CALL: Final = ToolCall(name="probe_call", arguments={"probe_key": "v"}, call_id="probe0000")
_PROBE: Final[Sequence[Message]] = (
    {"role": "user", "content": "u"},
    assistant_message("", None, [_PROBE_CALL]),
)
_PROBE_TOOL: Final[Mapping[str, Any]] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "d",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string", "description": "d"}}},
    },
}
_FORMATS: Final[Mapping[str, Reader]] = {
    r'<tool_call>\s*\{[^<]*"probe_call"[^<]*"v"[^<]*\}\s*</tool_call>': read_json_blocks,
    r"<tool_call>\s*<function=probe_call>\s*<parameter=probe_key>\s*v\s*</parameter>\s*</function>": read_xml_blocks,
    r'\{"name": "probe_call", "parameters": \{"probe_key": "v"\}\}': read_bare_json,
}


def find_reader(write: Callable[[Sequence[Message], Schemas], str | None]) -> Reader | None:
    """Returns what reads the calls that a chat template, `write`, writes; None where the format is not known."""
    text = write(_PROBE, [_PROBE_TOOL]) or ""
    for pattern, reader in _FORMATS.items():
        if re.search(pattern, text):
            return reader
    return None


_Found = tuple[str, dict[str, Any], int]
"""The name of the call that a text begins with, its arguments and its length."""


def _read_blocks(text: str, read: Callable[[str], _Found]) -> Read:
    """Reads the calls of a turn; `read` raises ValueError for one that cannot be read."""
    content = ""
    calls = list[ToolCall]()
    readable = False
    for piece in _pieces(text):
        if not piece.startswith(_OPEN):
            if piece.strip() or not calls:
                content += piece
            continue
        body = piece.removeprefix(_OPEN)
        try:
            name, arguments, end = read(body)
            if body[end:].strip() != _CLOSE:
                raise ValueError(f"no {_CLOSE} follows it")
        except (ValueError, RecursionError) as error:
            calls.append(broken_call(str(error), body.strip(), len(calls)))
            content += piece
            continue
        if not readable:
            content = content.removesuffix("\n")
            readable = True
        calls.append(ToolCall(name=name, arguments=arguments, call_id=f"call_{len(calls)}"))
    return content, tuple(calls)


def _pieces(text: str) -> Iterator[str]:
    """Yields the blocks of a text, and what is between them; a marker in a string of JSON is none."""
    end = 0
    while (start := text.find(_OPEN, end)) >= 0:
        yield text[end:start]
        body = start + len(_OPEN)
        while text[body : body + 1].isspace():
            body += 1
        with suppress(ValueError, RecursionError):
            _, body = json.JSONDecoder().raw_decode(text, body)
        close = text.find(_CLOSE, body)
        end = len(text) if close < 0 else close + len(_CLOSE)
        yield text[start:end]
    yield text[end:]


def _json_block(body: str) -> _Found:
    start = len(body) - len(body.lstrip())
    value, end = json.JSONDecoder().raw_decode(body, start)
    return *_call(value, "arguments"), end


def _xml_block(body: str, tools: Schemas) -> _Found:
    start = re.match(r"\s*<function=([^>\n]+)>", body)
    if start is None:
        raise ValueError("it does not begin with <function=NAME>")
    name = start[1].strip()
    end = start.end()
    arguments = dict[str, Any]()
    while (found := _PARAMETER.match(body, end)) is not None:
        arguments[found[1]] = _value(found[2], _schema(tools, name, found[1]))
        end = found.end()
    close = _FUNCTION_END.match(body, end)
    if close is None:
        raise ValueError("its parameters do not end with </function>")
    return name, arguments, close.end()


def _schema(tools: Schemas, name: str, parameter: str) -> Mapping[str, Any]:
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = function.get("parameters", {}).get("properties", {})
            return properties.get(parameter, {})
    return {}


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    if schema.get("type", "string") == "string" and "anyOf" not in schema:
        return text
    if text in _PYTHON:
        return _PYTHON[text]
    try:
        return _writable(json.loads(text))
    except (ValueError, RecursionError):
        return text


def _call(value: Any, key: str) -> tuple[str, dict[str, Any]]:
    """Returns the name and the arguments of a call."""
    call: dict[str, Any] = value if isinstance(value, dict) else {}
    name: Any = call.get("name")
    arguments: Any = call.get(key, {})
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError(f'it is not {{"name": ..., "{key}": {{...}}}}')
    return _writable((name, arguments))


def _writable[T](value: T) -> T:
    """Returns a value of JSON; raises ValueError for NaN and halves of characters, which templates cannot write."""
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


def broken_call(reason: str, text: str, index: int) -> ToolCall:
    """Returns a call that cannot be read."""
    problem = f"not a call of a tool: {reason}: {text}"
    return ToolCall(name="", call_id=f"call_{index}", problem=problem)
