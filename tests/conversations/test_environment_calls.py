"""Calls of environments in real child processes: large messages, and children that do not answer."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megarl.config.schema import EnvironmentSettings
from megarl.conversations import environment_calls, environment_process
from megarl.conversations.environment_calls import EnvironmentChildren, LostEnvironmentError
from megarl.environments.environment import EnvironmentTask
from tests.conversations.test_environment_process import Characters, converse, outcomes
from tests.leftovers import comes_true
from tests.rewards.test_process import alive

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

LARGE = 8 << 20
"""Characters, many times what a pipe holds."""


def task(fields: Mapping[str, Any]) -> EnvironmentTask:
    return EnvironmentTask(prompt_id="0", fields=fields)


def test_messages_are_large_and_a_child_that_reads_none_stops_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_calls, "_GRACE_S", 0.5)

    async def talk() -> tuple[list[Any], float, int]:
        children = EnvironmentChildren(EnvironmentSettings(name="tests.conversations.worlds:Echo", time_limit=20))
        await children.start()
        async with children.place() as child:
            said = await asyncio.gather(*(child.call(n, "reset", task({"says": str(n) * LARGE}), 0) for n in range(3)))
            assert [reply.observation.messages for reply in said] == [str(n) * LARGE for n in range(3)]
            pid = int(str((await child.call(3, "reset", task({}), 0)).observation.messages))
            os.kill(pid, signal.SIGSTOP)
            child._limit_s = 0.5
            late = [asyncio.create_task(child.call(n, "reset", task({"says": "x" * LARGE}), 0)) for n in range(4, 7)]
            longest, last = 0.0, time.monotonic()
            while not all(call.done() for call in late):
                await asyncio.sleep(0.01)
                longest, last = max(longest, time.monotonic() - last), time.monotonic()
            results = await asyncio.gather(*late, return_exceptions=True)
        await children.close()
        return results, longest, pid

    results, longest, pid = asyncio.run(talk())
    assert all(isinstance(result, LostEnvironmentError) and not result.alone for result in results), results
    assert "has not answered for 0.5 s more than environment.time_limit = 0.5 s" in str(results[0])
    assert longest < 5, "the event loop goes on"
    assert comes_true(lambda: not alive(pid))


@pytest.mark.parametrize("way", ["blocks the loop", "holds the interpreter"])
def test_who_blocks_the_process_is_found_and_others_come_to_an_end(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(environment_calls, "_GRACE_S", 0.5)
    monkeypatch.setattr(environment_process, "load_tokenizer", lambda _: Characters())
    begun = time.monotonic()
    _, infos = converse([None, "slow", way, "slow"], time_limit=2, retries=0)
    assert time.monotonic() - begun < 60
    assert [outcome.failure is None for outcome in outcomes(infos)] == [True, True, False, True]
    assert "a method blocks it" in str(outcomes(infos)[2].failure)


async def test_a_child_that_starts_is_ended_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "sleeping.py").write_text(
        "import os, pathlib, time\n"
        "pathlib.Path(__file__).with_suffix('.pid').write_text(f'{os.getpid()} ')\n"
        "time.sleep(600)\n"
    )

    children = EnvironmentChildren(EnvironmentSettings(name="sleeping:Never"))
    starting = asyncio.create_task(children.start())
    while not (told := tmp_path / "sleeping.pid").exists() or not told.read_text():
        await asyncio.sleep(0.05)
    await asyncio.wait_for(children.close(), 30)
    assert not children.living
    starting.cancel()
    pid = int(told.read_text())
    assert comes_true(lambda: not alive(pid))
