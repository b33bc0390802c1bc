"""Tools in chats, and arguments of chat templates: written by the template, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.data.prompts import load_prompts
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.data.training_texts import load_demonstrations
from tests.data.rows import encoder, jsonl, tools_tokenizer, transformers_own

ADD: dict[str, Any] = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}]}
ASK, ANSWER = {"role": "user", "content": "1+1?"}, {"role": "tool", "content": "2"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tools_tokenizer(tmp_path_factory.mktemp("tools"))


def text(tokenizer: Tokenizer, path: Path, row: dict[str, Any], **changes: Any) -> str:
    """The first prompt as the model sees it."""
    (prompt,) = load_prompts(jsonl(path, [row]), encoder(tokenizer, max_tokens=1000, **changes)).items
    return tokenizer.decode(prompt.token_ids, special=True)


def test_tools_calls_and_results_are_formatted_by_the_template(directory: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(directory)
    chat = [ASK, {**CALL, "content": ""}, ANSWER]
    expected = transformers_own(directory).apply_chat_template(
        chat, tools=[ADD], tokenize=False, add_generation_prompt=True
    )
    assert "tools\nadd" in expected
    assert "call:add" in expected
    for tools in ([ADD], json.dumps([ADD])):
        assert text(tokenizer, tmp_path, {"messages": [ASK, CALL, ANSWER], "tools": tools}) == expected
    assert text(tokenizer, tmp_path, {"prompt": "1+1?", "tools": [ADD]}, chat_template=True).count("add") == 1
    assert text(tokenizer, tmp_path, {"prompt": [ASK], "tools": []}) == text(tokenizer, tmp_path, {"prompt": [ASK]})


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": [ASK], "tools": [ADD]}, "ignores the column tools"),
        ({"messages": [ASK, CALL, ASK]}, "ignores tool_calls"),
        ({"prompt": "1+1?", "tools": [ADD]}, "tools are for a prompt that is a chat"),
        ({"prompt": [ASK], "tools": ["add"]}, "list of descriptions"),
    ],
)
def test_fields_that_the_template_ignores_are_refused(
    chatml: Path, tmp_path: Path, row: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        text(load_tokenizer(chatml), tmp_path, row)


def test_a_tool_result_that_the_template_omits_is_refused(directory: Path, tmp_path: Path) -> None:
    hf = transformers_own(directory)
    hf.chat_template = "{% for m in messages if m['role'] != 'tool' %}{{ m['role'] + m['content'] }}{% endfor %}"
    with pytest.raises(ValueError, match="ignores messages of the role tool"):
        text(Tokenizer(hf, "own"), tmp_path, {"messages": [ASK, ANSWER]})


def test_a_response_with_tool_calls_is_refused(directory: Path, tmp_path: Path) -> None:
    for row in ({"messages": [ASK, CALL]}, {"prompt": [ASK], "completion": [{**CALL, "content": "see"}]}):
        with pytest.raises(ValueError, match="a response has tool_calls"):
            load_demonstrations(jsonl(tmp_path, [row]), encoder(load_tokenizer(directory)))


def test_arguments_reach_the_template(directory: Path, chatml: Path, tmp_path: Path) -> None:
    tokenizer, off = load_tokenizer(directory), {"enable_thinking": False}
    assert text(tokenizer, tmp_path, {"prompt": [ASK]}, template_arguments=off).endswith("assistant\n<think></think>")
    assert text(tokenizer, tmp_path, {"prompt": [ASK]}).endswith("assistant\n")
    tokenizer.check(vocab_size=1000, template_arguments=off)
    with pytest.raises(ValueError, match="does not read 'enable_thinking'"):
        load_tokenizer(chatml).check(vocab_size=1000, template_arguments=off)
