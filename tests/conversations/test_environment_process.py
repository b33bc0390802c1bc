"""Conversations in a process, without Ray: a fake engine samples the turns, environments run in a thread."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.config.schema import EnvironmentSettings
from megarl.conversations import environment_process
from megarl.conversations.chat_session import TurnLimits
from megarl.conversations.environment_calls import EnvironmentChild, EnvironmentChildren
from megarl.conversations.environment_child import EnvironmentHost
from megarl.conversations.environment_process import EnvironmentProcess
from megarl.data.tokenizer import load_tokenizer
from megarl.environments.builtin import ENVIRONMENTS, load_environment
from megarl.environments.environment import EnvironmentTask, FailedEnvironmentError
from megarl.errors import RunError
from megarl.rewards import child_process
from megarl.rewards.child_process import ChildProcess
from megarl.texts import escape_output
from megarl.types import (
    ConversationOutcome,
    Prompt,
    SampledTurn,
    SampleInfo,
    SampleRequest,
)
from tests.conversations.gateways import gateway_tokenizer
from tests.conversations.test_conversations import held
from tests.data.encoded_texts import encoded_lengths

LIMITS = TurnLimits(context=64, turn=8, turns=4)
ANSWER = "abc"


class Characters:
    """A tokenizer whose ids are the codes of characters."""

    end_token_id, has_chat_template = 0, False

    def limited(self, tokens: int) -> Characters:
        del tokens
        return self

    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))

    continuation = encode

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return "".join(map(chr, ids))


def serve(theirs: socket.socket) -> None:
    """Answers like the child process; an environment that exits closes the connection."""
    with Connection(theirs.detach()) as connection, suppress(EOFError, OSError):
        host = EnvironmentHost(connection.recv(), connection)
        connection.send(True)
        while True:
            number, call = connection.recv()
            if call.method == "reset" and call.args[0].fields.get("way") == "exits":
                return
            host.answer(number, call)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[ChildProcess]:
    """The children that have started, in threads of this process."""
    started: list[ChildProcess] = []

    def launch(child: ChildProcess) -> tuple[Any, socket.socket]:
        started.append(child)
        ours, theirs = socket.socketpair()
        threading.Thread(target=serve, args=(theirs,), daemon=True).start()
        return SimpleNamespace(terminate=lambda: None, wait=lambda _: -9), ours

    monkeypatch.setattr(ChildProcess, "_launch", launch)
    monkeypatch.setattr(environment_process, "_HEARTBEAT_S", 0.1)
    monkeypatch.setattr(environment_process, "load_tokenizer", lambda _: Characters())
    return started


class Says:
    """Says `ANSWER` in every turn."""

    def answer(self, _: SampleRequest) -> SampledTurn:
        ids = (*map(ord, ANSWER), 0)
        return SampledTurn(token_ids=ids, logprobs=np.zeros(len(ids), np.float32), finished=True, versions=())


def converse(ways: Sequence[str | None], **settings: Any) -> tuple[Any, list[SampleInfo]]:
    """Holds a conversation per way to fail."""
    prompts = [Prompt(prompt_id=str(row), token_ids=(), fields={"way": way}) for row, way in enumerate(ways)]
    return held(Path(), Says(), {"name": "tests.conversations.worlds:Faulty", **settings}, prompts, LIMITS)


def outcomes(infos: Sequence[SampleInfo]) -> list[ConversationOutcome]:
    found = [info.outcome for info in infos if info.outcome is not None]
    assert len(found) == len(infos)
    return found


@pytest.mark.usefixtures("children")
def test_failures_have_reasons_and_no_score_and_disturb_nobody() -> None:
    ways = [None, "reset", "step", "once", "nan", "pending", "nonsense", "silent", None]
    chunk, infos = converse(ways)
    good = [way in (None, "once") for way in ways]
    assert np.isfinite([info.reward for info in infos]).tolist() == good
    reasons: list[Any] = [outcome.failure for outcome in outcomes(infos)]
    assert [reason is None for reason in reasons] == good
    for way, end in {
        "reset": "KeyError: 'nothing here'",
        "step": "RuntimeError: no way",
        "nan": "step returned reward = nan: it must be finite",
        "pending": "step returned None: it must return an Observation",
        "nonsense": "reset returned 7: it must return an Observation, messages or a text",
        "silent": "a turn follows messages or a text",
    }.items():
        assert reasons[ways.index(way)].strip().endswith(end)
    assert outcomes(infos)[0] == ConversationOutcome(turns=1, truncated=False, failure=None, metrics={"length": 3})
    assert chunk.rewards[0] == 1


@pytest.mark.usefixtures("children")
def test_half_a_character_fails_its_conversation_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is short, also where it is printed; the name of a metric can be written."""
    monkeypatch.setenv("PYTHONIOENCODING", "")
    escape_output()
    _, infos = converse([None, "half a character", "metric of half a character"], retries=1)
    assert [outcome.failure is None for outcome in outcomes(infos)] == [True, False, True]
    reason = str(outcomes(infos)[1].failure)
    assert reason.endswith("bad \ud800")
    assert len(reason) < 3000
    assert outcomes(infos)[2].metrics == {r"m\ud800": 1.0}
    printed = capsys.readouterr().out
    assert printed.splitlines().count(r"bad \ud800") == 2
    assert len(printed) < 6000


@pytest.mark.usefixtures("children")
def test_a_text_of_megabytes_ends_its_conversation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without being encoded, as it cannot fit."""
    directory = gateway_tokenizer(tmp_path)
    tokenizer = load_tokenizer(directory)  # what it imports takes seconds
    monkeypatch.setattr(environment_process, "load_tokenizer", lambda _: tokenizer)
    lengths = encoded_lengths(monkeypatch)
    chunk, infos = converse([None, "megabytes", "begins with megabytes"], retries=0)
    assert 0 < max(lengths) < 100_000
    ended, cut, never_begun = outcomes(infos)
    assert (ended.turns, ended.truncated, ended.failure) == (1, False, None)
    assert (cut.turns, cut.truncated, cut.failure) == (1, True, None)
    assert never_begun.failure == "its first prompt leaves no room for a turn"
    assert len(chunk.response_ids[1]) == len(ANSWER) + 1


def test_a_call_that_hangs_fails_by_itself(children: list[ChildProcess]) -> None:
    ways = [None, "hangs", "blocks", "hangs at its end", None]
    begun = time.monotonic()
    _, infos = converse(ways, time_limit=0.3, retries=1)
    assert time.monotonic() - begun < 4, "two tries of two calls, at the same time"
    assert [info.reward for info in infos][:: len(ways) - 1] == [1, 1]
    limit = "took longer than environment.time_limit = 0.3 s"
    assert [outcome.failure for outcome in outcomes(infos)[1:-1]] == [
        f"step {limit}",
        f"step {limit}",
        f"close {limit}",
    ]
    assert len(children) <= 3


@pytest.mark.parametrize("retries", [0, 2])
def test_a_crash_is_tried_again_in_a_new_process(children: list[ChildProcess], retries: int) -> None:
    _, infos = converse(["exits"], retries=retries)
    assert outcomes(infos)[0].failure == "its process ended by SIGKILL"
    assert len(children) == 1 + retries


@pytest.mark.usefixtures("children")
def test_a_process_that_cannot_be_ended_fails_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> str:
        raise PermissionError("no signal")

    monkeypatch.setattr(child_process, "_ended", fail)
    _, infos = converse(["exits"], retries=0)
    assert outcomes(infos)[0].failure == "its process ended by PermissionError('no signal')"


def test_the_cause_of_a_crash_is_found_among_many(children: list[ChildProcess]) -> None:
    ways: list[str | None] = [None] * 100
    ways[37] = "exits"
    _, infos = converse(ways, retries=1)
    failed = [index for index, outcome in enumerate(outcomes(infos)) if outcome.failure is not None]
    assert failed == [37]
    assert len(children) <= 1 + 8 + 8 + 8 + 2


async def test_processes_that_take_no_further_conversations_are_few(children: list[ChildProcess]) -> None:
    own = EnvironmentChildren(EnvironmentSettings(name="tests.conversations.worlds:Faulty", time_limit=0.01))
    await own.start()
    async with AsyncExitStack() as held:
        for number in range(12):
            child = await held.enter_async_context(own.place())
            await child.call(number, "reset", EnvironmentTask(prompt_id="0", fields={"way": "hangs"}), 0)
            with pytest.raises(FailedEnvironmentError, match="took longer"):
                await child.call(number, "step", None)
        assert len(own.living) == len(children) == 1 + 8


async def test_a_process_that_cannot_start_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise OSError("too many open files")

    own = EnvironmentChildren(EnvironmentSettings(name="tests.conversations.worlds:Faulty"))
    monkeypatch.setattr(ChildProcess, "_launch", fail)
    groups = [EnvironmentChild(own, shared=False) for _ in range(12)]
    for child in [None, *groups, None]:
        with pytest.raises(OSError, match="too many"):
            async with asyncio.timeout(5), own.place(child):
                pass
    assert not own.living


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "args", "rule"),
    [
        ("tests.environments.nowhere:Letters", {}, "No module named"),
        ("tests.conversations.worlds:Letters", {"size": 3}, "unexpected keyword argument 'size'"),
    ],
)
def test_a_class_that_cannot_be_made_is_an_error_at_the_start(
    monkeypatch: pytest.MonkeyPatch, name: str, args: dict[str, Any], rule: str
) -> None:
    monkeypatch.setattr(environment_process, "load_tokenizer", lambda _: Characters())
    process = EnvironmentProcess(EnvironmentSettings(name=name, args=args), "", {}, LIMITS)
    with pytest.raises(RunError, match=rule):
        process.start()


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("tests.conversations.worlds:Nothing", "must be a class that is derived from"),
        ("tool", f"one of {', '.join(ENVIRONMENTS)}, gateway"),
    ],
)
def test_a_name_that_is_no_class_is_refused(name: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        load_environment(EnvironmentSettings(name=name))
