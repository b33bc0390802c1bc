"""Templates that are proved to write each message by itself: a shorter chat shows what follows a turn."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from megarl.data.tokenizer import Message
from megarl.environments.chat import TemplateRenderer
from megarl.environments.local_templates import writes_locally
from tests.environments.families import FAMILIES, end_ids, tokenizer

LOCAL = ("qwen2.5", "qwen3-2507", "hermes", "llama3", "phi3", "mistral")
AFTER_QUERY = ("qwen3", "glm4.5")
BODY = "{% for message in messages %}{{ message.content }}{% endfor %}"


def test_the_families_whose_templates_are_local() -> None:
    assert tuple(name for name in FAMILIES if writes_locally(tokenizer(name).hf.chat_template)) == LOCAL


@pytest.mark.parametrize(
    "template",
    [
        BODY,
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}" + BODY,
        "{% for message in messages %}{% if loop.first or loop.index0 > 0 %}{{ loop.last }}{% endif %}{% endfor %}",
        "{% for message in messages %}{{ messages[loop.index0 - 1].role }}{{ loop.nextitem.role }}{% endfor %}",
        "{% for message in messages %}{% for call in message.tool_calls %}{{ loop.index }}{% endfor %}{% endfor %}",
        "{% set ns = namespace(seen=0) %}{% for tool in tools %}{% set ns.seen = ns.seen + 1 %}{% endfor %}" + BODY,
        "{% macro told(message) %}{{ message.content }}{% endmacro %}"
        "{% for message in messages %}{{ told(message) }}{% endfor %}",
    ],
)
def test_local(template: str) -> None:
    assert writes_locally(template)


@pytest.mark.parametrize(
    "template",
    [
        None,
        {"default": BODY},
        "{% for message in messages %}",
        "no loop",
        BODY + BODY,
        "{{ messages[-1].content }}" + BODY,
        "{{ messages[1].content }}" + BODY,
        "{{ messages | length }}" + BODY,
        "{% set messages = messages[1:] %}" + BODY,
        "{% set others = messages %}" + BODY,
        "{% set ns = namespace(seen=0) %}{% for message in messages %}{{ ns.seen }}{% set ns.seen = 1 %}{% endfor %}",
        "{% set ns = namespace(seen=0) %}{% macro see(ns) %}{% set ns.seen = ns.seen + 1 %}{{ ns.seen }}{% endmacro %}"
        "{% for message in messages %}{{ see(ns) }}{% endfor %}",
        "{% for message in messages if message.content %}{{ message.content }}{% endfor %}",
        "{% for message in messages recursive %}{{ message.content }}{% endfor %}",
        "{% for message in messages %}{{ message.content }}{% break %}{% endfor %}",
        "{% for message in messages %}{{ loop.index0 % 2 }}{% endfor %}",
        "{% for message in messages %}{{ loop.index0 > 1 }}{% endfor %}",
        "{% for message in messages %}{{ loop.length }}{% endfor %}",
        "{% for message in messages %}{{ loop.changed(message.role) }}{% endfor %}",
        "{% for message in messages %}{% set outer = loop %}{{ outer.index }}{% endfor %}",
        "{% for message in messages %}{{ messages[loop.index0 - 2].role }}{% endfor %}",
        "{% for message in messages %}{% for call in message.tool_calls %}{{ messages[loop.index0 - 1] }}{% endfor %}"
        "{% endfor %}",
        "{% for tool in tools %}" + BODY + "{% endfor %}",
        "{% macro all() %}" + BODY + "{% endmacro %}{{ all() }}",
        "{% include 'other' %}" + BODY,
        "{% set all %}" + BODY + "{% endset %}{{ all | length }}",
        "{% filter upper %}" + BODY + "{% endfilter %}",
        "{% macro twice() %}{{ caller() }}{{ caller() }}{% endmacro %}{% call twice() %}" + BODY + "{% endcall %}",
        "{% set next = cycler('a', 'b') %}{% for message in messages %}{{ next.next() }}{% endfor %}",
        "{% set names = tools | map(attribute='name') %}{% for message in messages %}{{ names | list }}{% endfor %}",
    ],
)
def test_not_proved(template: object) -> None:
    assert not writes_locally(template)


QWEN3, GLM = (str(tokenizer(name).hf.chat_template) for name in AFTER_QUERY)


def test_the_families_whose_templates_look_for_the_last_message_of_the_user() -> None:
    found = [name for name in FAMILIES if writes_locally(tokenizer(name).hf.chat_template, after_query=True)]
    assert tuple(found) == AFTER_QUERY


@pytest.mark.parametrize(
    ("template", "old", "new"),
    [
        (QWEN3, "loop.index0 > ns.last_query_index", "loop.index0 >= ns.last_query_index"),
        (QWEN3, "loop.index0 > ns.last_query_index", "loop.index0 - 1 > ns.last_query_index"),
        (QWEN3, "loop.index0 > ns.last_query_index", "ns.multi_step_tool"),
        (QWEN3, 'message.role == "user" and message.content', 'message.role == "tool" and message.content'),
        (QWEN3, "{%- for message in messages %}", "{%- set ns.last_query_index = 3 %}{%- for message in messages %}"),
        (QWEN3, "{%- if (loop.first and content)", "{%- if loop.index0 > ns.last_query_index and (content)"),
        (QWEN3, "{%- set index =", "{{ message.role }}{%- set index ="),
        (GLM, "loop.index0 > ns.last_user_index", "loop.index0 > ns.last_user_index > 1"),
        (GLM, "namespace(last_user_index=-1)", "namespace(last_user_index=1)"),
        (GLM, "{% set ns.last_user_index = loop.index0 -%}", "{% set ns.last_user_index = loop.index -%}"),
    ],
)
def test_not_proved_with_another_rule(template: str, old: str, new: str) -> None:
    assert template.count(old) == 1
    assert not writes_locally(template.replace(old, new), after_query=True)


@pytest.mark.parametrize("history", ["template", "sampled"])
@pytest.mark.parametrize("name", AFTER_QUERY)
def test_a_chat_without_what_is_before_the_last_message_of_the_user_shows_the_same(name: str, history: Any) -> None:
    chance, continued = random.Random(name), Counter[bool]()
    short, whole = (TemplateRenderer(tokenizer(name), {}, ends=end_ids(name), history=history) for _ in range(2))
    whole._after_query = False
    assert short._after_query
    for _ in range(400):
        before = [message(chance) for _ in range(chance.randrange(3, 14))]
        for index, each in enumerate(before):
            if each["role"] == "assistant" and chance.random() < 0.5:
                before[index] = {**each, "reasoning_content": "why"}
            elif each["role"] == "user" and chance.random() < 0.2:
                before[index] = {**each, "content": "<tool_response>\nno question\n</tool_response>"}
        after = [message(chance) for _ in range(chance.randrange(1, 3))]
        family, thinks = FAMILIES[name], chance.random() < 0.3
        assert family.thought is not None
        said = family.thought("why", "yes") if thinks else family.said("yes")
        turn = [*tokenizer(name).continuation(said), chance.choice(end_ids(name))]
        action = short.read(turn, True, prompt=(), tools=())
        given = [renderer.follow(before, action, after, prompt=(), tools=()) for renderer in (short, whole)]
        assert given[0] == given[1], (before, said, after)
        continued[given[0] is not None] += 1
    assert min(continued.values()) > 30


@pytest.mark.parametrize("given", ["user", "tool"])
@pytest.mark.parametrize("name", [*LOCAL, *AFTER_QUERY])
def test_what_is_rendered_does_not_grow_with_the_number_of_turns(
    name: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = TemplateRenderer(tokenizer(name), {}, ends=end_ids(name), history="sampled")
    written, lengths = tokenizer(name).written, list[int]()

    def write(chat: Sequence[Message], *args: Any) -> str:
        lengths.append(len(chat))
        return written(chat, *args)

    monkeypatch.setattr(tokenizer(name), "written", write)
    chat: list[Message] = [{"role": "user", "content": "one"}]
    turn = [*tokenizer(name).continuation(FAMILIES[name].said("yes")), end_ids(name)[0]]
    for _ in range(20):
        action = renderer.read(turn, True, prompt=(), tools=())
        after = {"role": given, "content": "two"}
        renderer.follow(chat, action, [after], prompt=(), tools=())
        chat += [action.message, after]
    assert len(chat) > 40
    assert max(lengths) <= 8


@pytest.mark.parametrize("history", ["template", "sampled"])
@pytest.mark.parametrize("name", LOCAL)
def test_a_shorter_chat_shows_what_the_whole_chat_shows(name: str, history: Any) -> None:
    """Of random chats that the template writes, and turns, some of which it writes in another way or refuses."""
    chance, continued = random.Random(name), 0
    short, whole = (TemplateRenderer(tokenizer(name), {}, ends=end_ids(name), history=history) for _ in range(2))
    whole._local = False
    assert short._local
    for _ in range(150):
        before = [message(chance) for _ in range(chance.randrange(5, 12))]
        if whole._written(before, ()) is None:
            before = [each for each in before if each["role"] in ("user", "assistant")]
        text = FAMILIES[name].said(chance.choice(["yes", "no ", "", "a\n\nb"]))
        turn = [*tokenizer(name).continuation(text), chance.choice(end_ids(name))]
        after = [message(chance) for _ in range(chance.randrange(1, 3))]
        action = short.read(turn, True, prompt=(), tools=())
        given = [renderer.follow(before, action, after, prompt=(), tools=()) for renderer in (short, whole)]
        assert given[0] == given[1], (before, text, after)
        continued += given[0] is not None
    assert continued > 30


def message(chance: random.Random) -> Message:
    role, content = chance.choice(["user", "user", "assistant", "tool", "system"]), chance.choice(["one", "two ", ""])
    if role == "assistant" and chance.random() < 0.5:
        call = {"type": "function", "function": {"name": "look", "arguments": {"key": chance.randrange(9)}}}
        return {"role": role, "content": content, "tool_calls": [call]}
    return {"role": role, "content": content}
