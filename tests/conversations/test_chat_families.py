"""Renderers of the package `renderers`, by a stand-in with one family."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megarl.conversations.chat import ChatRenderer
from megarl.data.tokenizer import Tokenizer
from megarl.environments.environment import ToolCall
from tests.conversations.families import end_ids, tokenizer
from tests.conversations.test_chat import ASKED, CALL, RESULT, TOOL, rendered
from tests.needs import lacking


class Family:
    """Writes like the template, and continues every turn but one that an assistant follows."""

    def __init__(self, tokens: Tokenizer, extra: str = "") -> None:
        self._tokens, self._extra = tokens, extra

    def render_ids(self, messages: Any, *, tools: Any, add_generation_prompt: bool) -> list[int]:
        assert add_generation_prompt
        return self._tokens.continuation(self._tokens.written(messages, tools, {}) + self._extra)

    def parse_response(self, token_ids: list[int], *, tools: Any, prompt_ids: list[int]) -> Any:
        assert (tools, prompt_ids) == ([TOOL], [1, 2])
        good = SimpleNamespace(status="ok", name="add", arguments={"a": 1}, id=None, raw="")
        bad = SimpleNamespace(status="invalid_json", name=None, arguments=None, id=None, raw="{a\n")
        return SimpleNamespace(content="c", reasoning_content="t", tool_calls=[good, bad])

    def bridge_to_next_turn(self, prompt: list[int], turn: list[int], messages: Sequence[Any], *, tools: Any) -> Any:
        assert tools == [TOOL]
        if messages[0]["role"] == "assistant":
            return None
        known = [*prompt, *turn]
        return SimpleNamespace(token_ids=[*(known[1:] if messages[0]["content"] == "lost" else known), 7, 8])


def install(monkeypatch: pytest.MonkeyPatch, **families: Any) -> None:
    """Replaces the package by one with some families, by what they write after every chat."""
    module = ModuleType("renderers")
    module.__spec__ = ModuleSpec("renderers", None)

    def create(hf: Any, config: Any, chat_template_kwargs: Any) -> Family:
        if config.extra is None:
            raise ValueError("it lacks a special token")
        return Family(Tokenizer(hf, "family"), config.extra)

    def config_from_name(name: str) -> Any:
        class Config:
            extra = families[name]

            def __init__(self, thinking_retention: str | None = None) -> None:
                pass

        return Config()

    given = {"base": SimpleNamespace(MODEL_RENDERER_MAP={name: name for name in families})}
    vars(module).update(given | {"config_from_name": config_from_name, "create_renderer": create})
    monkeypatch.setitem(sys.modules, "renderers", module)


def test_a_family_is_used_if_it_writes_like_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tokenizer("qwen2.5")
    with monkeypatch.context() as patch:
        install(patch, broken=None, other="!")
        assert ChatRenderer(tokens, {}, history="sampled")._family is None
        install(patch, broken=None, other="!", right="")
        assert ChatRenderer(tokens, {})._family is None, "it reads calls, and branches"
        found = ChatRenderer(tokens, {}, history="sampled")
        assert found._family is not None
        assert tokens.decode(found.begin([ASKED], [TOOL]), special=True) == rendered("qwen2.5", [ASKED], [TOOL])
        assert ChatRenderer(tokenizer("glm4.5"), {})._family is not None, "its calls are not read otherwise"


def with_family(name: str, family: Any, history: Any = "sampled") -> ChatRenderer:
    renderer = ChatRenderer(tokenizer(name), {}, history=history)
    renderer._family = family
    return renderer


def test_a_family_reads_turns_whose_calls_the_template_alone_does_not_tell() -> None:
    for name in ("glm4.5", "qwen2.5"):
        tokens = tokenizer(name)
        renderer = with_family(name, Family(tokens))
        said = [*tokens.continuation("some text"), tokens.end_token_id]
        action = renderer.read(said, True, prompt=[1, 2], tools=[TOOL])
        assert action.text == "some text"
        if name == "qwen2.5":
            assert (action.content, action.thoughts, action.tool_calls) == ("some text", None, ())
            continue
        assert (action.content, action.thoughts) == ("c", "t")
        good, bad = action.tool_calls
        assert good == ToolCall(name="add", arguments={"a": 1}, call_id="call_0")
        assert bad.problem == "not a call of a tool: invalid_json: {a\n"


def test_an_error_of_the_package_fails_the_conversation() -> None:
    renderer = with_family("glm4.5", object())
    with pytest.raises(ValueError, match="renderers failed in parse_response"):
        renderer.read([1], True, prompt=[1, 2], tools=[TOOL])


def test_a_family_continues_turns_that_the_template_rewrites(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tokenizer("llama3")
    renderer = with_family("llama3", Family(tokens))

    def follow(said: str, *messages: Any, end: bool = True, among: ChatRenderer = renderer) -> Any:
        ids = [*tokens.continuation(said), *[tokens.end_token_id] * end]
        action = among.read(ids, end, prompt=[1, 2], tools=[TOOL])
        return among.follow([ASKED], action, messages, prompt=[1, 2], tools=[TOOL])

    assert follow("a", ASKED) == follow("a", ASKED, among=ChatRenderer(tokens, {})), "what is proved is not asked for"
    monkeypatch.setattr(renderer, "_rest", lambda *_: None)
    assert follow("a ", ASKED) == [7, 8]
    assert follow("a ", ASKED, among=with_family("llama3", Family(tokens), "template")) is None
    assert follow("a ", {"role": "assistant", "content": ""}) is None
    assert follow("a ", {"role": "user", "content": "lost"}) is None
    assert follow("a ", ASKED, end=False) is None


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package itself, which verifiers needs, too."""
    found = list((Path(__file__).parents[2] / ".venv-verifiers/lib").glob("python3*/site-packages"))
    if not found:
        lacking("make verifiers installs renderers")
    monkeypatch.setattr(sys, "path", [*sys.path, str(found[0])])
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "renderers"]:
        del sys.modules[name]


@pytest.mark.usefixtures("package")
def test_the_package_reads_and_continues_calls_of_glm() -> None:
    """Whose format is read by no other."""
    tokens = tokenizer("glm4.5")
    renderer = ChatRenderer(tokens, {}, ends=end_ids("glm4.5"), history="sampled")
    values = "".join(f"\n<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>" for name, value in CALL[1].items())
    text = f"\n<think>1 + 1\nis é</think>\n<tool_call>{CALL[0]}{values}\n</tool_call>"
    prompt, said = renderer.begin([ASKED], [TOOL]), tokens.continuation(f"{text}<|observation|>")
    action = renderer.read(said, True, prompt=prompt, tools=[TOOL])
    assert [(call.name, call.arguments) for call in action.tool_calls] == [CALL]
    assert (action.text, action.thoughts, action.content) == (text, "\n1 + 1\nis é", "")
    follows = renderer.follow([ASKED], action, [RESULT], prompt=prompt, tools=[TOOL])
    assert follows is not None
    whole = rendered("glm4.5", [ASKED, action.message, RESULT], [TOOL])
    assert tokens.decode([*prompt, *said, *follows], special=True) == whole
