"""Chats as ids: what is read next continues what was sampled, or a branch begins; against whole chats anew."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.conversations.chat import ChatRenderer
from megarl.conversations.chat_session import ChatSession, SessionTurn, TurnLimits
from megarl.conversations.conversation import Conversation
from megarl.conversations.environment_child import Reply
from megarl.conversations.environment_process import EnvironmentProcess
from megarl.environments.environment import Action, FailedEnvironmentError, Observation
from megarl.types import Prompt, SampledTurn, SampleRequest
from tests.conversations.families import FAMILIES, end_ids, tokenizer
from tests.unit_profile import fewer

History = Literal["template", "sampled"]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "one"}, "b": {"type": "string", "description": "é"}},
            "required": ["a", "b"],
        },
    },
}
ASKED: dict[str, Any] = {"role": "user", "content": "hé 你好\n\n 1 + 1?"}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "call_0", "name": "add", "content": "2"}
CALL = ("add", {"a": 1, "b": "é x"})
SYSTEM: dict[str, Any] = {"role": "system", "content": "Sëi kurz."}
SIGNS = "\U0001f469\u200d\U0001f467 \u05e9\u05dc e\u0301 \u00a0\u3000\ufeff\x85\u2028 \u0000 ﬁ"
"""Joined, from right to left, combined, white space of many kinds: what normalisation and stripping change."""


def rendered(name: str, chat: Sequence[Any], tools: Sequence[Any] = ()) -> str:
    """The whole chat, by transformers."""
    return str(
        tokenizer(name).hf.apply_chat_template(
            list(chat), tools=list(tools) or None, tokenize=False, add_generation_prompt=True
        )
    )


def outcome(
    name: str,
    said: str,
    given: Sequence[Any],
    history: History,
    tools: Sequence[Any] = (),
    end: str | None = None,
    before: Sequence[Any] = (ASKED,),
) -> str:
    """Continues, branches or refused: what a turn and what follows it lead to; checks the ids."""
    tokens = tokenizer(name)
    renderer = ChatRenderer(tokens, {}, ends=end_ids(name), history=history)
    try:
        prompt = renderer.begin(before, tools)
    except ValueError:
        return "refused"
    sampled = tokens.continuation(said + (end or FAMILIES[name].ends[0]))
    action = renderer.read(sampled, True, prompt=prompt, tools=tools)
    assert action.text == said
    chat = [*before, action.message, *given]
    follows = renderer.follow(before, action, given, prompt=prompt, tools=tools)
    if follows is None:
        try:
            renderer.begin(chat, tools)
        except ValueError:
            return "refused"
        return "branches"
    whole = rendered(name, chat, tools)
    ids = [*prompt, *sampled, *follows]
    if history == "template":
        assert tokens.decode(ids, special=True) == whole
        if not said.startswith("\n"):  # which has one token with a line break before it
            assert ids == tokens.continuation(whole)
    assert tokens.continuation(whole)[-len(follows) :] == follows
    return "continues"


def cases(name: str) -> dict[str, dict[str, Any]]:
    """Turns and what follows them, by their names."""
    family = FAMILIES[name]
    found: dict[str, dict[str, Any]] = {
        "plain": {"said": family.said("ok\n\nwéll"), "given": [ASKED]},
        "empty": {"said": family.said(""), "given": [ASKED]},
        "empty answer": {"said": family.said("ok"), "given": [{"role": "user", "content": ""}]},
        "signs": {"said": family.said(f"ok{SIGNS}."), "given": [{"role": "user", "content": f"ok{SIGNS}."}]},
        "system": {"said": family.said("ok"), "given": [ASKED], "before": [SYSTEM, ASKED]},
        "system later": {"said": family.said("ok"), "given": [SYSTEM, ASKED]},
        "end in a message": {"said": family.said("ok"), "given": [{**ASKED, "content": f"a{family.ends[0]}b"}]},
        "white space": {"said": family.said("ok") + " \n", "given": [ASKED]},
    }
    if len(family.ends) > 1:
        found["other end"] = {"said": family.said("ok"), "given": [ASKED], "end": family.ends[1]}
    if family.thought is not None:
        thought = family.thought("1 + 1\nis é", "ok")
        found["thoughts, user"] = {"said": thought, "given": [ASKED]}
        found["thoughts, tool"] = {"said": thought, "given": [RESULT], "end": family.tool_end}
    if family.called is None:
        return found | {"call": {"said": family.said("ok"), "given": [RESULT], "tools": [TOOL]}}
    called = family.called([CALL])
    found["call"] = {"said": called, "given": [RESULT], "tools": [TOOL]}
    found["call in other words"] = {"said": called.replace("{", "{ ") + "\n", "given": [RESULT], "tools": [TOOL]}
    broken = called.replace('"name"', "name").replace("</function>", "")
    found["broken call"] = {"said": broken, "given": [ASKED], "tools": [TOOL]}
    if name != "llama3":
        found["two calls"] = {"said": family.called([CALL] * 2), "given": [RESULT] * 2, "tools": [TOOL]}
    return found


_PLAIN = ("plain", "empty", "empty answer", "signs", "end in a message", "system")
_LATER = "system later"
BRANCHES: dict[str, Sequence[str]] = {
    "qwen2.5": ["call in other words"],
    "qwen3": ["thoughts, user", "call in other words"],
    "qwen3-2507": ["call in other words"],
    "qwen3.5": [*_PLAIN, "white space", "thoughts, user", "call in other words", "broken call"],
    "hermes": ["call in other words"],
    "llama3": ["white space", "call in other words"],
    "deepseek-r1": [*_PLAIN, "white space", "thoughts, user", "thoughts, tool"],
    "glm4.5": ["empty", "white space", "thoughts, user"],
    "gemma": ["white space"],
    "mistral": ["white space"],
}
"""Turns that the family's template rewrites."""
REFUSED: dict[str, Sequence[str]] = {
    "qwen3.5": [_LATER],
    "deepseek-r1": ["call"],
    "phi3": ["call"],
    "glm4.5": ["call"],
    "gemma": ["call", "system", _LATER],
    "mistral": ["call", "system", _LATER],
    "gpt-oss": [*_PLAIN, _LATER, "white space", "other end", "call"],
}
"""No format of calls is known, or the template refuses the chat."""
MOVED = ("deepseek-r1", "glm4.5")
"""A later system message is written before the turns, or does not begin with the token that ended the turn."""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_turn_continues_branches_or_is_refused(name: str) -> None:
    found = {case: outcome(name, **given, history="template") for case, given in cases(name).items()}
    kept = {case: outcome(name, **given, history="sampled") for case, given in cases(name).items()}
    other = dict.fromkeys(found, "continues") | ({"other end": "branches"} if "other end" in found else {})
    other |= dict.fromkeys([_LATER], "branches") if name in MOVED else {}
    other |= dict.fromkeys(REFUSED.get(name, []), "refused")
    assert kept == other
    assert found == other | dict.fromkeys(BRANCHES.get(name, []), "branches")


def renderer_of(name: str, eats: bool = False) -> ChatRenderer:
    return ChatRenderer(tokenizer(name, eats), {}, ends=end_ids(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_turn_that_was_cut_off_never_continues(name: str) -> None:
    """Wherever: in thoughts, calls and characters."""
    tokens = tokenizer(name)
    for case in cases(name).values():
        tools = case.get("tools", ())
        said = tokens.continuation(case["said"])
        for history in ("template", "sampled"):
            renderer = ChatRenderer(tokens, {}, ends=end_ids(name), history=history)
            for length in range(1, len(said)):
                action = renderer.read(said[:length], False, prompt=(), tools=tools)
                assert not action.finished
                assert action.token_ids == tuple(said[:length])
                assert action.text == tokens.decode(said[:length], special=True)
                assert renderer.follow([ASKED], action, case["given"], prompt=(), tools=tools) is None
                assert renderer.follow([], action, "text", prompt=(), tools=tools) is None


def continued(name: str, said: Sequence[int], eats: bool = False) -> tuple[Action, list[int], str]:
    """A turn after a message, all ids with what follows it, and the whole chat anew."""
    renderer = renderer_of(name, eats)
    prompt = renderer.begin([ASKED], ())
    action = renderer.read(said, True, prompt=prompt, tools=())
    follows = renderer.follow([ASKED], action, [ASKED], prompt=prompt, tools=())
    assert follows is not None
    whole = rendered(name, [ASKED, action.message, ASKED])
    return action, [*prompt, *action.token_ids, *follows], whole


def test_a_turn_that_a_text_ended_gets_the_end_token_from_the_template() -> None:
    tokens = tokenizer("qwen2.5")
    action, ids, whole = continued("qwen2.5", tokens.continuation("ok STOP"))
    assert action.text == "ok STOP"
    assert tokens.decode(ids, special=True) == whole


def test_ids_that_are_no_text_stay_as_they_were_sampled() -> None:
    tokens = tokenizer("qwen2.5")
    said = (*tokens.continuation("é")[:1], tokens.end_token_id)
    action, ids, whole = continued("qwen2.5", said)
    assert (action.text, action.token_ids) == ("\ufffd", said)
    assert tokens.decode(ids, special=True) == whole


def test_special_tokens_may_take_the_white_space_after_them() -> None:
    tokens = tokenizer("phi3", eats=True)
    _, ids, whole = continued("phi3", tokens.continuation("ok<|end|>"), eats=True)
    assert ids == tokens.continuation(whole)


THOUGHT = "<think>\na\n</think>\n\nb"


@pytest.mark.parametrize(
    ("name", "said", "thoughts", "content"),
    [
        ("qwen3", THOUGHT, "a", "b"),
        ("qwen2.5", THOUGHT, None, THOUGHT),
        ("qwen3.5", "a\n</think>\n\nb", "a", "b"),
        ("deepseek-r1", "a", "a", ""),
        ("qwen3", "b</think>", None, "b</think>"),
    ],
)
def test_thoughts_are_told_apart_where_the_template_knows_them(
    name: str, said: str, thoughts: str | None, content: str
) -> None:
    action = renderer_of(name).read(tokenizer(name).continuation(said), True, prompt=(), tools=())
    assert (action.thoughts, action.content) == (thoughts, content)


def session_of(renderer: ChatRenderer, sample: Any, turns: int = 100) -> ChatSession:
    request = SampleRequest(sample_id="a", prompt=Prompt(prompt_id="a", token_ids=()), seed=1)
    limits = TurnLimits(context=1 << 20, turn=1 << 20, turns=turns)
    return ChatSession(Conversation(request=request), renderer, sample, limits)


def turn_of(session: ChatSession, chat: Sequence[Any], tools: Sequence[Any] = ()) -> SessionTurn:
    turn = asyncio.run(session.turn(chat, tools))
    assert turn is not None
    return turn


def says(name: str, said: str) -> Any:
    """A model that always says the same."""
    ids = (*tokenizer(name).continuation(said), tokenizer(name).end_token_id)

    async def sample(request: SampleRequest) -> SampledTurn:
        return SampledTurn(token_ids=ids, logprobs=np.zeros(len(ids), np.float32), finished=True, versions=())

    return sample


def test_other_tools_begin_a_branch() -> None:
    tokens = tokenizer("qwen2.5")
    session = session_of(renderer_of("qwen2.5"), says("qwen2.5", "ok"))
    chat = [ASKED]
    for tools in ([TOOL], [TOOL], [TOOL, TOOL], []):
        turn = turn_of(session, chat, tools)
        chat += [turn.action.message, ASKED]
    assert [len(branch.turns) for branch in session.conversation.branches] == [2, 1, 1]
    for branch, (length, tools) in zip(
        session.conversation.branches, ((1, [TOOL]), (5, [TOOL, TOOL]), (7, [])), strict=True
    ):
        assert tokens.decode(branch.prompt, special=True) == rendered("qwen2.5", chat[:length], tools)


@pytest.mark.parametrize("changed", [0, 1])
def test_a_chat_with_another_earlier_message_begins_a_branch(changed: int) -> None:
    tokens = tokenizer("qwen2.5")
    session = session_of(renderer_of("qwen2.5"), says("qwen2.5", "ok"))
    turn = turn_of(session, [ASKED])
    chat = [ASKED, turn.action.message, ASKED]
    chat[changed] = {**chat[changed], "content": "another"}
    asyncio.run(session.turn(chat))
    assert [len(branch.turns) for branch in session.conversation.branches] == [1, 1]
    assert tokens.decode(session.conversation.branch.prompt, special=True) == rendered("qwen2.5", chat)


def test_a_turn_that_cannot_be_read_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session may ask again: what was given before the turn is there once."""
    renderer, tokens = renderer_of("qwen2.5"), tokenizer("qwen2.5")
    session = session_of(renderer, says("qwen2.5", "ok"))
    turn = turn_of(session, [ASKED])
    chat = [ASKED, turn.action.message, ASKED]
    with monkeypatch.context() as broken:
        broken.setattr(renderer, "read", lambda *_, **__: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            asyncio.run(session.turn(chat))
    asyncio.run(session.turn(chat))
    (branch,) = session.conversation.branches
    whole = rendered("qwen2.5", chat) + "ok" + FAMILIES["qwen2.5"].ends[0]
    assert tokens.decode(branch.ids, special=True) == whole


def test_turns_after_many_branches_cost_what_they_do_after_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a template that drops thoughts: only the branch with the longest chat is compared with the new one."""
    renderer, chat, followed = renderer_of("deepseek-r1"), [ASKED], list[int]()
    session, follow = session_of(renderer, says("deepseek-r1", "hm\n</think>\n\nok")), renderer.follow
    monkeypatch.setattr(renderer, "follow", lambda *args, **more: (followed.append(1), follow(*args, **more))[1])
    for _ in range(10):
        turn = turn_of(session, chat)
        chat = [*chat, turn.action.message, ASKED]
    assert len(session.conversation.branches) == 10
    assert len(followed) == 9


def test_messages_cannot_follow_a_text() -> None:
    session = session_of(renderer_of("qwen2.5"), says("qwen2.5", "ok"))
    replies = iter(Reply(observation=Observation(messages=given), tools=()) for given in ("b", [ASKED]))

    async def call(method: str, action: Action) -> Reply:
        return next(replies)

    first = Reply(observation=Observation(messages=[ASKED]), tools=())
    process: Any = None
    with pytest.raises(FailedEnvironmentError, match="messages after a text"):
        asyncio.run(EnvironmentProcess._take_turns(process, session, call, first))


# ---- random chats ----

WORDS = st.text(alphabet="ab é你\n\t <>/|{}\"'", max_size=12)


@st.composite
def talks(draw: st.DrawFn) -> tuple[str, list[dict[str, Any]]]:
    """A family, and turns: what the model says, and what it gets."""
    name = draw(st.sampled_from(sorted(set(FAMILIES) - {"gpt-oss"})))
    family, turns = FAMILIES[name], list[dict[str, Any]]()
    for _ in range(draw(st.integers(1, 4))):
        kinds = ["plain", "raw", "special"]
        kinds += ["thought"] if family.thought is not None else []
        kinds += ["call"] if family.called is not None else []
        kind = draw(st.sampled_from(kinds))
        text, answer = family.said(draw(WORDS)), [{"role": "user", "content": draw(WORDS)}]
        if kind == "raw":
            text = draw(WORDS)
        elif kind == "special":
            text += draw(st.sampled_from([special for special in family.specials if special not in family.ends]))
        elif kind == "thought":
            assert family.thought is not None
            text = family.thought(draw(WORDS), draw(WORDS))
        elif kind == "call":
            assert family.called is not None
            text, answer = family.called([("add", {"a": draw(st.integers()), "b": draw(WORDS)})]), [RESULT]
        cut = draw(st.integers(0, 5)) == 0
        turns.append({"text": text, "end": draw(st.sampled_from(family.ends)), "answer": answer, "cut": cut})
    return name, turns


def converse(name: str, history: History, turns: list[dict[str, Any]]) -> None:
    """Runs a session with a sampler that says the turns, and compares every prompt with the whole chat anew."""
    tokens, said, chat = tokenizer(name), iter(turns), [ASKED]
    tools = [TOOL] if FAMILIES[name].called is not None else []
    prompts: list[tuple[int, ...]] = []
    sampled: list[tuple[int, ...]] = []

    async def sample(request: SampleRequest) -> SampledTurn:
        turn = next(said)
        ids = tuple(tokens.continuation(turn["text"] + turn["end"]))
        ids = ids[: max(1, len(ids) // 2)] if turn["cut"] else ids
        prompts.append(tuple(request.prompt.token_ids))
        sampled.append(ids)
        logprobs = np.full(len(ids), -float(len(prompts)), np.float32)
        return SampledTurn(token_ids=ids, logprobs=logprobs, finished=not turn["cut"], versions=())

    session = session_of(ChatRenderer(tokens, {}, ends=end_ids(name), history=history), sample, turns=10)
    conversation = session.conversation
    for turn in turns:
        action = turn_of(session, chat, tools).action
        assert turn["cut"] or action.text == turn["text"]
        if history == "template" or len(prompts) == 1:
            assert tokens.decode(prompts[-1], special=True) == rendered(name, chat, tools)
        continued = len(conversation.branch.turns) > 1
        if continued:
            assert not turns[len(prompts) - 2]["cut"]
            before = (*prompts[-2], *sampled[-2])
            assert prompts[-1][: len(before)] == before
            follows = list(prompts[-1][len(before) :])
            assert tokens.continuation(rendered(name, chat, tools))[-len(follows) :] == follows
        chat += [action.message, *turn["answer"]]
    for branch in conversation.branches:
        masked = [token for token, own in zip(branch.response, branch.loss_mask, strict=True) if own]
        first = prompts.index(branch.prompt)
        assert masked == [token for ids in sampled[first : first + len(branch.turns)] for token in ids]
        assert len(branch.logprobs) == len(masked)


@settings(max_examples=fewer(60), deadline=None)
@given(talks())
def test_random_chats_continue_exactly_or_begin_branches(talk: tuple[str, list[dict[str, Any]]]) -> None:
    for history in ("template", "sampled"):
        converse(talk[0], history, talk[1])
