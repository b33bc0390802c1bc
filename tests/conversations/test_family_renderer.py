"""Renderers of the package `renderers`, by a stand-in with one family."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megarl.conversations.chat import TemplateRenderer
from megarl.conversations.family_renderer import FamilyRenderer, find_renderer
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
        bad = SimpleNamespace(status="invalid_json", name=None, arguments=None, id=None, raw="{a")
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
        assert isinstance(find_renderer(tokens, {}), TemplateRenderer)
        assert isinstance(find_renderer(tokens, {}, history="sampled"), TemplateRenderer)
        install(patch, broken=None, other="!", right="")
        assert isinstance(find_renderer(tokens, {}), TemplateRenderer), "it reads calls, and branches"
        assert isinstance(found := find_renderer(tokens, {}, history="sampled"), FamilyRenderer)
        assert tokens.decode(found.begin([ASKED], [TOOL]), special=True) == rendered("qwen2.5", [ASKED], [TOOL])
        assert isinstance(find_renderer(tokenizer("glm4.5"), {}), FamilyRenderer), "its calls are not read otherwise"


def test_a_family_reads_turns_whose_calls_the_template_alone_does_not_tell() -> None:
    for name in ("glm4.5", "qwen2.5"):
        tokens = tokenizer(name)
        renderer = FamilyRenderer(TemplateRenderer(tokens, {}), Family(tokens), bridges=True)
        said = [*tokens.continuation("some text"), tokens.end_token_id]
        action = renderer.read(said, True, prompt=[1, 2], tools=[TOOL])
        assert action.text == "some text"
        if name == "qwen2.5":
            assert (action.content, action.thoughts, action.tool_calls) == ("some text", None, ())
            continue
        assert (action.content, action.thoughts) == ("c", "t")
        good, bad = action.tool_calls
        assert good == ToolCall(name="add", arguments={"a": 1}, call_id="call_0")
        assert bad.problem is not None
        assert "{a" in bad.problem


def test_an_error_of_the_package_fails_the_conversation() -> None:
    tokens = tokenizer("glm4.5")
    renderer = FamilyRenderer(TemplateRenderer(tokens, {}), object(), bridges=True)
    with pytest.raises(ValueError, match="renderers cannot read"):
        renderer.read([1], True, prompt=[1, 2], tools=[TOOL])


def test_a_family_continues_turns_that_the_template_rewrites() -> None:
    tokens = tokenizer("llama3")
    template = TemplateRenderer(tokens, {})
    renderer = FamilyRenderer(template, Family(tokens), bridges=True)
    said = [*tokens.continuation("a "), tokens.end_token_id]  # the template drops the space
    action = renderer.read(said, True, prompt=[1, 2], tools=[TOOL])

    def follow(message: Any, among: FamilyRenderer = renderer) -> Any:
        return among.follow([ASKED], action, [message], prompt=[1, 2], tools=[TOOL])

    assert follow(ASKED) == [7, 8]
    assert follow(ASKED, FamilyRenderer(template, Family(tokens), bridges=False)) is None
    assert follow({"role": "assistant", "content": ""}) is None
    assert follow({"role": "user", "content": "lost"}) is None
    assert renderer.follow([], action, "é", prompt=[1, 2], tools=()) == tokens.continuation("é")
    cut = renderer.read(said[:-1], False, prompt=[1, 2], tools=[TOOL])
    assert renderer.follow([ASKED], cut, [ASKED], prompt=[1, 2], tools=[TOOL]) is None
    exact = renderer.read([*tokens.continuation("a"), tokens.end_token_id], True, prompt=[1, 2], tools=[TOOL])
    proved = template.follow([ASKED], exact, [ASKED], prompt=[1, 2], tools=[TOOL])
    assert proved is not None
    assert renderer.follow([ASKED], exact, [ASKED], prompt=[1, 2], tools=[TOOL]) == proved


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
    renderer = find_renderer(tokens, {}, ends=end_ids("glm4.5"), history="sampled")
    assert isinstance(renderer, FamilyRenderer)
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
