"""The session gateway: keys, retries, limits, rewards, refusals, and many sessions at once."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from megarl.conversations.chat_session import TurnLimits
from megarl.conversations.gateway.gateway_anthropic import read_messages
from megarl.conversations.gateway.gateway_openai import read_response
from megarl.conversations.gateway.gateway_request import (
    GatewayError,
    GatewayRequest,
    RequestFields,
    Sampling,
)
from megarl.environments.environment import FailedEnvironmentError
from megarl.errors import RunError
from tests.conversations.gateways import (
    GatewayTest,
    GatewayWorld,
    call_text,
    gateway_session,
    gateway_world,
)
from tests.security.listeners import listeners
from tests.unit_profile import fewer

CHAT = "/v1/chat/completions"
HELLO = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


async def test_a_turn_that_is_asked_for_again_is_the_same(tokenizer: Path, tmp_path: Path) -> None:
    """While it is sampled, and when it is answered; the reward that is posted again replaces the first."""
    numbers = (f"answer {number}" for number in range(9))
    ready = asyncio.Event()

    async def slow() -> str:
        await ready.wait()
        return next(numbers)

    async with gateway_world(tokenizer, lambda _: slow(), tmp_path) as world:
        session = await world.session()
        with pytest.raises(asyncio.TimeoutError):  # the client gives up, and asks again
            await asyncio.wait_for(session.post(CHAT, HELLO), 0.2)
        again = [asyncio.create_task(session.post(CHAT, HELLO)) for _ in range(3)]
        await asyncio.sleep(0.05)
        ready.set()
        answers = [await each for each in again] + [await session.post(CHAT, HELLO)]
        assert all(answer == answers[0] for answer in answers)
        assert answers[0][1]["choices"][0]["message"]["content"] == "answer 0"
        assert (await session.post("/reward", {"reward": 0.25}))[0] == 200
        await session.end(reward=0.75)
        assert session.conversation.reward == 0.75
        assert session.conversation.turns == 1
        session.check_exact()


async def test_a_key_opens_its_own_session_alone(tokenizer: Path, tmp_path: Path) -> None:
    async with gateway_world(tokenizer, lambda _: "yes", tmp_path) as world:
        first, second = await world.session("a"), await world.session("b")
        run_key = json.loads(world.file.read_text())["key"]
        assert world.file.stat().st_mode & 0o777 == 0o600
        for wrong in ("", "wrong", second.key, run_key, "\u00e9"):
            for path in (CHAT, "/v1/messages", "/reward", "/nothing"):
                status, answer = await first.post(path, HELLO, key=wrong)
                assert status == 401, (path, wrong, answer)
                assert answer["error"]["type"] == "authentication_error"
                assert (answer.get("type") == "error") == (path == "/v1/messages")
        assert (await first.post("/nothing", {}))[0] == 404
        assert not world.record
        port = int(world.gateway.url.rpartition(":")[2])
        assert [found.on_loopback for found in listeners([os.getpid()]) if found.port == port] == [True]
        await first.post(CHAT, HELLO)
        await first.end()
        assert (await first.post(CHAT, HELLO))[0] == 401
        assert (await second.post(CHAT, HELLO))[0] == 200
        async with aiohttp.ClientSession() as client:
            for asked in ("POST /tasks/next", "GET /", "PUT //x", "POST /get_or_create"):
                method, path = asked.split()
                async with client.request(method, world.gateway.url + path) as answer:
                    assert answer.status in (400, 401), asked
        await second.end()


REFUSED: tuple[dict[str, Any], ...] = (
    {"tool_choice": "required", "tools": [TOOL]},
    {"tool_choice": "none", "tools": [TOOL]},
    {"parallel_tool_calls": False},
    {"logprobs": True, "top_logprobs": 2},
    {"n": 0},
    {"n": True},
    {"max_tokens": -1},
    {"max_tokens": "many"},
    {"max_completion_tokens": 0, "max_tokens": 0},
    {"stream": "yes"},
    {"something": 1},
    {"model": "gpt-4o"},
    {"messages": []},
    {"messages": "hello"},
    {"messages": [5]},
    {"messages": [{"role": "function", "content": "x"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "assistant", "content": "a beginning"}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "b", "arguments": "{"}}]}]},
    {"messages": [{"role": "assistant", "tool_calls": 5}]},
    {"messages": [{"role": "tool", "content": "x"}]},
    {"n": 10**9},
    {"tools": [{"type": "web_search"}]},
    {"tools": [{"type": "function", "function": {"name": "x", "parameters": []}}]},
)


async def test_what_cannot_be_honoured_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    """In words and without a turn; so is garbage. What changes nothing is accepted."""
    async with gateway_world(tokenizer, lambda _: "yes", tmp_path) as world:
        session = await world.session()
        for body in REFUSED:
            status, answer = await session.post(CHAT, {**HELLO, **body})
            assert status == (404 if "model" in body else 400), body
            assert next(iter(body)) in answer["error"]["message"] or "messages" in body, (body, answer)
        _, answer = await session.post(CHAT, {"messages": [], "max_tokens": 0})
        assert "the last message" in answer["error"]["message"]
        sampling = {"seed": "a seed per turn", "presence_penalty": 0.5, "frequency_penalty": 0.5}
        for other in sampling.items():
            _, answer = await session.post(CHAT, HELLO | dict([other]))
            assert "the run samples otherwise" in answer["error"]["message"], other
        for body in (b"", b"{", b"[]", b"null", b"[" * 100_000, b'{"messages": \xff}', b"\x00" * 100):
            for path in (CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/reward"):
                assert (await session.post(path, body))[0] == 400, (path, body[:20])
        for prompt in ([], [10**6], [-1], [1.5], "", {}, ["two", "texts"], [[1], [2]]):
            assert (await session.post("/v1/completions", {"prompt": prompt}))[0] == 400, prompt
        for value in ("much", True, math.nan):
            assert (await session.post("/reward", {"reward": value}))[0] == 400, value
        for name in ("failed", "score", "done"):
            assert (await session.post("/reward", {name: 1}))[0] == 400, name
        assert (await session.post("/reward", {"reward": 1.0}))[0] == 409
        assert not world.record
        neutral = {"temperature": 1, "top_p": 1.0, "n": 1, "stop": None, "presence_penalty": 0, "user": "me"}
        assert (await session.post(CHAT, {**HELLO, **neutral, "tool_choice": "auto"}))[0] == 200
        await session.end()


@pytest.mark.parametrize(
    ("read", "name", "thoughts", "limit"),
    [
        (
            read_messages,
            "messages",
            {"role": "assistant", "content": [{"type": "thinking", "thinking": ""}]},
            "max_tokens",
        ),
        (read_response, "input", {"type": "reasoning", "summary": []}, "max_output_tokens"),
    ],
)
def test_empty_thoughts_are_thoughts(
    read: Callable[[RequestFields], GatewayRequest], name: str, thoughts: dict[str, Any], limit: str
) -> None:
    """As the model wrote them."""
    body = {name: [thoughts, {"role": "user", "content": "hello"}], limit: 5}
    request = read(RequestFields(body, Sampling(), "policy", {}))
    assert request.messages[0] == {"role": "assistant", "content": "", "reasoning_content": ""}


FRACTIONS = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
OTHER_SAMPLING: dict[str, Any] = {**dict.fromkeys(FRACTIONS, 0.5), "top_k": 3, "seed": 1}
"""What `override_sampling` ignores."""
UNKNOWN = (
    *("min_p", "repetition_penalty", "length_penalty", "min_tokens", "bad_words"),
    *("allowed_token_ids", "stop_token_ids", "ignore_eos", "structured_outputs", "guided_json"),
    *("thinking_token_budget", "repetition_detection", "use_beam_search", "logits_processors"),
    *("vllm_xargs", "extra_body", "sampling_params"),
)
"""What other servers sample with."""
OTHER_DISTRIBUTIONS: dict[str, Any] = dict.fromkeys(UNKNOWN, 1) | {
    "logit_bias": {"5": 1},
    "stop": ["x"],
    "stop_sequences": ["x"],
    "response_format": {"type": "json_object"},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}},
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "best_of": 2,
}
ASKED: dict[str, dict[str, Any]] = {
    CHAT: HELLO,
    "/v1/completions": {"model": "policy", "prompt": "hello"},
    "/v1/responses": {"model": "policy", "input": "hello"},
    "/v1/messages": {**HELLO, "max_tokens": 5},
}


@pytest.mark.parametrize("path", ASKED)
async def test_no_request_changes_the_distribution(tokenizer: Path, tmp_path: Path, path: str) -> None:
    """Whose log-probabilities would not be those of the trainers: what the run does not sample with is refused."""
    async with gateway_world(tokenizer, lambda _: "yes", tmp_path) as world:
        session = await world.session()
        for name, value in (OTHER_SAMPLING | OTHER_DISTRIBUTIONS).items():
            status, answer = await session.post(path, {**ASKED[path], name: value})
            assert (status, name in answer["error"]["message"]) == (400, True), (name, answer)
        assert not world.record
        assert (await session.post(path, ASKED[path]))[0] == 200
        await session.end()
    async with gateway_world(tokenizer, lambda _: "yes", tmp_path, override_sampling=True) as world:
        session = await world.session()
        for name, value in OTHER_DISTRIBUTIONS.items():
            assert (await session.post(path, {**ASKED[path], name: value}))[0] == 400, name
        assert (await session.post(path, ASKED[path] | OTHER_SAMPLING))[0] == 200
        assert len(world.record) == 1
        await session.end()


async def test_limits_end_turns_and_sessions(tokenizer: Path, tmp_path: Path) -> None:
    limits = TurnLimits(context=100, turn=20, turns=3)
    long = "x" * 40
    async with gateway_world(tokenizer, lambda _: long, tmp_path, limits, time_limit=2.0, rewarded=False) as world:
        silent, session = await world.session("b"), await world.session()
        status, answer = await session.post(CHAT, {**HELLO, "max_tokens": 7})
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 7
        status, answer = await session.post(CHAT, {**HELLO, "messages": [{"role": "user", "content": long * 3}]})
        assert status == 400
        assert "rollout.max_model_len" in answer["error"]["message"]
        assert (await session.post(CHAT, {**HELLO, "n": 2}))[0] == 200
        messages = [{"role": "user", "content": "other"}]
        assert (await session.post(CHAT, {**HELLO, "messages": messages}))[0] == 400  # a fourth turn
        session.check_exact()
        with pytest.raises(FailedEnvironmentError, match=r"asked for no turn for environment\.time_limit"):
            await session.running
        with pytest.raises(FailedEnvironmentError, match="has asked for no turn"):
            await silent.running
        unrewarded = await world.session("c")
        await unrewarded.post(CHAT, HELLO)
        await unrewarded.post("/reward", {"done": True})
        with pytest.raises(FailedEnvironmentError, match="posted no reward"):
            await unrewarded.running


async def test_one_of_several_turns_that_fails_waits_for_the_others(tokenizer: Path, tmp_path: Path) -> None:
    """None is left with an engine when the session ends."""
    asked = iter(range(2))
    sampling = set[int]()

    async def answer(prompt: str) -> str:
        if (number := next(asked)) == 0:
            raise ValueError("broken")
        sampling.add(number)
        await asyncio.sleep(0.2)
        sampling.remove(number)
        return "yes"

    async with gateway_world(tokenizer, answer, tmp_path) as world:
        session = await world.session()
        assert (await session.post(CHAT, {**HELLO, "n": 2}))[0] == 400
        assert not sampling
        assert session.conversation.turns == 1


async def test_turns_that_all_fail_reach_the_limit(tokenizer: Path, tmp_path: Path) -> None:
    async def answer(_: str) -> str:
        raise ValueError("broken")

    limits = TurnLimits(context=100, turn=9, turns=1000)
    async with gateway_world(tokenizer, answer, tmp_path, limits, time_limit=1.0) as world:
        session = await world.session()
        async with asyncio.timeout(20):
            while not session.running.done():
                assert (await session.post(CHAT, HELLO))[0] in (400, 401)
                await asyncio.sleep(0.05)
        with pytest.raises(FailedEnvironmentError, match="has asked for no turn"):
            await session.running


async def test_requests_at_the_same_time_share_the_turns_that_are_left(tokenizer: Path, tmp_path: Path) -> None:
    """One that is refused has sampled nothing."""
    async with gateway_world(tokenizer, lambda _: "yes", tmp_path, TurnLimits(context=100, turn=9, turns=2)) as world:
        session = gateway_session(world)
        asks = [GatewayRequest(prompt="one"), GatewayRequest(prompt="two", count=2)]
        first, second = await asyncio.gather(*map(session.answered, asks), return_exceptions=True)
        assert isinstance(first, tuple)
        assert isinstance(second, GatewayError)
        assert len(world.record) == 1
        answers, _ = await session.answered(GatewayRequest(prompt="three"))
        assert len(answers) == 1


async def test_a_turn_that_is_sampled_when_the_session_is_done_is_left_out(tokenizer: Path, tmp_path: Path) -> None:
    """Also while the harness has time to end."""
    asked = asyncio.Event()
    ready = asyncio.Event()

    async def answer(prompt: str) -> str:
        if prompt == "slow":
            asked.set()
            await ready.wait()
        return "yes"

    async with gateway_world(tokenizer, answer, tmp_path) as world:
        for failed in (False, True):
            session = gateway_session(world, name := f"failed {failed}")
            await session.answered(GatewayRequest(prompt="quick"))
            slow = asyncio.create_task(session.answered(GatewayRequest(prompt="slow")))
            await asked.wait()
            session.fail("broken") if failed else session.reward(1.0, done=True)
            ready.set()
            with pytest.raises(GatewayError, match="the session has ended"):
                await slow
            assert f"{name}/turn-1" in world.record
            assert session._chat.conversation.turns == 1
            asked.clear()
            ready.clear()


async def test_a_reward_that_arrives_when_the_session_has_ended_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    async with gateway_world(tokenizer, lambda _: "yes", tmp_path) as world:
        session = await world.session()
        await session.post(CHAT, HELLO)

        async def body() -> AsyncIterator[bytes]:
            yield b'{"reward": '
            await asyncio.sleep(0.1)
            await session.end()
            yield b"1}"

        headers = {"Authorization": f"Bearer {session.key}"}
        async with (
            aiohttp.ClientSession(headers=headers) as client,
            client.post(session.url + "/reward", data=body()) as answer,
        ):
            assert answer.status == 401


async def test_broken_calls_and_lost_thoughts_continue_the_branch(tokenizer: Path, tmp_path: Path) -> None:
    """A client does not see that a call is broken, and sends no thoughts back."""
    answers = iter(
        ["<think>\nhm\n</think>\n\nwell", "so<tool_call>\n{broken\n</tool_call>", call_text("add", a=1), "end"]
    )
    async with gateway_world(tokenizer, lambda _: next(answers), tmp_path) as world:
        session = await world.session()
        messages: list[Any] = [{"role": "developer", "content": "be brief"}]
        for turn in range(4):
            messages.append({"role": "user", "content": [{"type": "text", "text": f"question {turn}"}]})
            _, answer = await session.post(CHAT, {"messages": messages, "tools": [TOOL], "n": 1})
            message = answer["choices"][0]["message"]
            if turn == 0:
                assert message.pop("reasoning_content") == "hm"
            if turn == 2:
                (call,) = message["tool_calls"]
                assert json.loads(call["function"]["arguments"]) == {"a": 1}
                assert message["content"] is None
                message |= {"content": "", "refusal": None, "annotations": []}
                call["function"]["arguments"] = '{ "a" : 1 }'
            else:
                assert "tool_calls" not in message
            messages.append(message)
        await session.end()
        assert len(session.conversation.branches) == 1
        session.check_exact()


async def _talk(session: GatewayTest, client: aiohttp.ClientSession, turns: int) -> None:
    """Takes turns, each of which must know what was said in this session, and nothing else."""
    messages: list[Any] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{session.task['prompt_id']} {turn};"})
        headers = {"Authorization": f"Bearer {session.key}"}
        async with client.post(session.url + CHAT, json={"messages": messages}, headers=headers) as answer:
            message = (await answer.json())["choices"][0]["message"]
        assert message["content"] == f"{session.task['prompt_id']} {turn}"
        messages.append(message)


async def test_many_sessions_at_once(tokenizer: Path, tmp_path: Path) -> None:
    """64, of 20 turns: nothing is lost, nothing is mixed up, and every session has one branch with its own turns."""

    async def answer(prompt: str) -> str:
        await asyncio.sleep(len(prompt) % 7 / 1000)
        return prompt.rpartition("user\n")[2].partition(";")[0]

    limits = TurnLimits(context=1 << 14, turn=64, turns=20)
    async with gateway_world(tokenizer, answer, tmp_path, limits) as world:
        sessions = [await world.session(f"name-{index}") for index in range(fewer(64))]
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
            await asyncio.gather(*(_talk(session, client, 20) for session in sessions))
        for index, session in enumerate(sessions):
            await session.end(reward=index / 64)
            assert session.conversation.reward == index / 64
            assert [len(branch.turns) for branch in session.conversation.branches] == [20]
            session.check_exact()
        assert len(world.record) == len(sessions) * 20


HARNESS = """
import json, os, sys, urllib.request

def post(path, **body):
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["MEGARL_SESSION_URL"] + path, json.dumps(body).encode(), key)
    return json.load(urllib.request.urlopen(request))

task = json.loads(os.environ["MEGARL_TASK"])
assert not [name for name in os.environ if name.startswith("RAY_")]
assert os.environ["MEGARL_SESSION"] == "mark of the run"
what = task["fields"]["what"]
if what == "nothing":
    sys.exit()
said = post("/v1/chat/completions", messages=[{"role": "user", "content": what}])
print("the model said", said["choices"][0]["message"]["content"])
if what == "fail":
    sys.exit(3)
if what == "hang":
    import subprocess, time
    open(task["fields"]["file"], "w").write(str(subprocess.Popen(["sleep", "1000"]).pid))
    time.sleep(1000)
post("/reward", reward=0.5, done=what == "done")
if what == "done":
    sys.exit(4)
"""


@pytest.mark.process
async def test_harnesses_are_started_scored_and_ended(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "harness.py").write_text(HARNESS)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.setenv("MEGARL_SESSION", "mark of the run")
    command = [sys.executable, "-S", str(tmp_path / "harness.py")]
    args = {"command": command, "time_limit": 4.0, "rewarded": False}
    async with gateway_world(tokenizer, lambda _: "yes", tmp_path, **args) as world:
        failures = {
            "nothing": "asked for no turn",
            "fail": r"exit status 3\nthe model said yes",
            "hang": r"asked for no turn for environment.time_limit = 4 s",
        }
        file = tmp_path / "pid"
        good = [world.converse(what, what=what) for what in ("well", "done")]
        bad = {what: world.converse(what, what=what, file=str(file))[1] for what in failures}
        for conversation, running in good:
            await running
            assert conversation.reward == 0.5
        for what, problem in failures.items():
            with pytest.raises(FailedEnvironmentError, match=problem):
                await bad[what]
        status, deadline = Path(f"/proc/{file.read_text()}/stat"), time.monotonic() + 10
        while status.exists() and status.read_text().split()[2] != "Z":  # it has been killed
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
    assert not world.file.exists()
    async with gateway_world(tokenizer, lambda _: "yes", tmp_path, command=["/nowhere"]) as world:
        with pytest.raises(FailedEnvironmentError, match="/nowhere does not start: No such file"):
            await world.converse()[1]


async def test_harnesses_elsewhere_may_be_lost_fail_or_not_come(tokenizer: Path, tmp_path: Path) -> None:
    """One that has died after a turn, or in a request; one that says why it has no reward; none at all."""
    args = {"time_limit": 1.0, "wait_limit": 2.0, "rewarded": False}
    async with gateway_world(tokenizer, lambda _: "yes", tmp_path, **args) as world:
        dead, failed, cut = [await world.session(name) for name in "abc"]
        waiting = world.converse("d")[1]
        await dead.post(CHAT, HELLO)
        assert (await failed.post("/reward", {"failed": "no database"}))[0] == 200
        assert (await failed.post(CHAT, HELLO))[0] == 401
        host, port = world.gateway.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        path = f"{cut.url.removeprefix(world.gateway.url)}{CHAT}"
        writer.write(f"POST {path} HTTP/1.1\r\nx-api-key: {cut.key}\r\nContent-Length: 99\r\n\r\n{{".encode())
        await writer.drain()
        writer.close()
        assert (await cut.post(CHAT, HELLO))[0] == 200
        await cut.end()
        cut.check_exact()
        with pytest.raises(FailedEnvironmentError, match="no database"):
            await failed.running
        with pytest.raises(FailedEnvironmentError, match="the harness asked for no turn for"):
            await dead.running
        assert not waiting.done()
        with pytest.raises(RunError, match=r"no harness has asked http\S+ for a task in 2 s.*wait_limit"):
            await waiting


def test_settings_are_checked(tokenizer: Path, tmp_path: Path) -> None:
    wrong: tuple[dict[str, Any], ...] = ({"command": 5}, {"command": []}, {"port": 1 << 16}, {"model": ""}, {"x": 1})
    wrong += ({"wait_limit": 0},)
    for args in wrong:
        with pytest.raises(RunError, match=next(iter(args))):
            GatewayWorld(tokenizer, lambda _: "", tmp_path, TurnLimits(context=1, turn=1, turns=1), **args)
