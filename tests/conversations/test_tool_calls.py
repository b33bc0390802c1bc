"""Calls of tools in the texts of turns."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.conversations import tool_calls
from megarl.conversations.tool_calls import read_bare_json, read_json_blocks, read_xml_blocks
from megarl.environments.environment import ToolCall
from tests.conversations import families

TYPES: dict[str, Any] = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "flag": {"type": "boolean"},
    "list": {"type": "array"},
    "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": TYPES}}}


def call(index: int = 0, name: str = "f", /, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments, call_id=f"call_{index}")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("only text\n", "only text\n", []),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [call(a=1)]),
        ('  so:\n\n<tool_call>{"name": "f"}</tool_call>', "  so:\n", [call()]),
        (
            '<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call>"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "g", "arguments": {"b": [true, null, "é"]}}\n</tool_call>',
            "",
            [call(a="</tool_call>"), call(1, "g", b=[True, None, "é"])],
        ),
        ('<tool_call>{"name": "f"}</tool_call>after', "after", [call()]),
    ],
)
def test_json_blocks(text: str, content: str, calls: list[ToolCall]) -> None:
    assert read_json_blocks(text, []) == (content, tuple(calls))


def test_xml_blocks_have_the_types_of_the_schema_and_are_text_otherwise() -> None:
    values = {
        "text": "1\n true",
        "count": "12",
        "flag": "True",
        "list": '["a", {"b": 1}]',
        "either": "None",
        "own": "3",
    }
    text = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    content, calls = read_xml_blocks(f"so\n<tool_call>\n<function=f>\n{text}</function>\n</tool_call>", [TOOL])
    expected = {"text": "1\n true", "count": 12, "flag": True, "list": ["a", {"b": 1}], "either": None, "own": "3"}
    assert (content, calls) == ("so", (call(**expected),))
    _, calls = read_xml_blocks(
        "<tool_call><function=f><parameter=count>two</parameter></function></tool_call>"
        "<tool_call>\n<function=g>\n</function>\n</tool_call>",
        [TOOL],
    )
    assert calls == (call(count="two"), call(1, "g"))


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "f", "parameters": {"a": 1}}', "", [call(a=1)]),
        ('<|python_tag|>{"name": "f", "parameters": {}}', "", [call()]),
        ('{"type": "function", "name": "f", "parameters": {}}', "", [call()]),
        ('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": ";"}}', "", [call(), call(1, "g", a=";")]),
        ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
        ('I call {"name": "f", "parameters": {}}', 'I call {"name": "f", "parameters": {}}', []),
        ("", "", []),
    ],
)
def test_bare_json(text: str, content: str, calls: list[ToolCall]) -> None:
    assert read_bare_json(text, []) == (content, tuple(calls))


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (read_json_blocks, '<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>'),
        (read_json_blocks, '<tool_call>\n{"name": "f", "arguments": {}}'),
        (read_json_blocks, '<tool_call>\n{"name": "f", "arguments": "{}"}\n</tool_call>'),
        (read_json_blocks, '<tool_call>\n{"arguments": {}}\n</tool_call>'),
        (read_json_blocks, '<tool_call>\n["f"]\n</tool_call>'),
        (read_json_blocks, "<tool_call></tool_call>"),
        (read_json_blocks, "<tool_call>"),
        (read_xml_blocks, "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>"),
        (read_xml_blocks, "<tool_call>\n<parameter=a>\n1\n</parameter>\n</tool_call>"),
        (read_xml_blocks, "<tool_call>\n<function=f>\n</function>\n"),
        (read_bare_json, '{"name": "f", "parameters": {"a": 1}'),
        (read_bare_json, "<|python_tag|>print(1)"),
        (read_bare_json, '{"name": "f", "parameters": {}} and more'),
        (read_bare_json, '{"name": "f", "parameters": ' + "[" * 100_000),
        (read_json_blocks, '<tool_call>\n{"name": "f", "arguments": {"a": NaN}}\n</tool_call>'),
        (read_json_blocks, '<tool_call>\n{"name": "f", "arguments": {"half": "\\ud83d"}}\n</tool_call>'),
    ],
)
def test_a_call_that_cannot_be_read_is_told_and_stays_in_the_content(read: tool_calls.Reader, text: str) -> None:
    content, (broken,) = read(text, [TOOL])
    assert content == text
    assert broken.name == ""
    assert broken.problem is not None
    assert not broken.problem.endswith("\n")


def test_a_broken_call_among_others() -> None:
    broken = '<tool_call>\n{"name": f}\n</tool_call>'
    content, calls = read_json_blocks(f'{broken}\n<tool_call>\n{{"name": "g"}}\n</tool_call>', [])
    assert content == broken
    assert [(found.name, found.problem is None) for found in calls] == [("", False), ("g", True)]


@pytest.mark.parametrize("name", families.FAMILIES)
def test_the_format_is_found_from_the_template(name: str) -> None:
    tokenizer = families.tokenizer(name)

    def write(chat: Any, tools: Any) -> str | None:
        try:
            return tokenizer.written(chat, tools, {})
        except Exception:
            return None

    expected = {"qwen3.5": read_xml_blocks, "llama3": read_bare_json}
    expected |= dict.fromkeys(("qwen2.5", "qwen3", "qwen3-2507", "hermes"), read_json_blocks)
    assert tool_calls.find_reader(write) is expected.get(name)
