"""One conversation behind a gateway, and the harness that holds it."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

from megarl.conversations.chat_session import ChatSession, SessionTurn
from megarl.conversations.gateway.gateway_request import GatewayError, GatewayRequest
from megarl.environments.environment import EnvironmentTask, FailedEnvironmentError, ToolCall
from megarl.rewards.child_process import end_with_parent, how_ended

_LONGEST_TASK = 100_000
"""Bytes of a task in an environment variable; the kernel takes 128 KiB."""
_MARK: Final = "MEGARL_SESSION"
"""By it a run finds what has left the process group, when it ends."""
_SHELL: Final = ("PATH", "HOME", "USER", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR")
_PASSED: Final = {*_SHELL, "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "SSL_CERT_FILE", _MARK}
"""Names of this process's variables that a harness gets; it may run what the model wrote, and gets no keys."""
_NO_ROOM: Final = (
    "prompt is too long, or there were too many turns: "
    "a conversation has environment.max_turns turns, each chat rollout.max_model_len tokens"
)
_KEPT_OUTPUT = 16_384
_GRACE_S = 5.0
"""For a harness to end by itself, after it has said that its session is done."""


Answered = tuple[Sequence[SessionTurn], int]
"""The turns that answer a request, with calls that can be read, and when: Unix time, seconds."""


class GatewaySession:
    """Answers the requests of one conversation.

    The same turns answer a repeated request, also while they are being sampled: clients repeat
    requests that take long. Without a request for a turn for `idle_s` seconds, the session fails.

    Attributes:
        running: what holds the conversation.
        sample: request of the conversation.
        task: what the harness gets, in JSON.
        call_ids: the model's ids of its tool calls, by those that clients get.
    """

    def __init__(self, chat: ChatSession, task: EnvironmentTask, idle_s: float) -> None:
        running = asyncio.current_task()
        assert running is not None
        self.running = running
        self.name = secrets.token_hex(8)
        self.key = secrets.token_urlsafe(32)
        self.sample = chat.conversation.request
        self.task = json.dumps({**vars(task), "seed": self.sample.seed}, default=str)
        self.call_ids: dict[str, str] = {}
        self.rewarded = False
        self.taken = asyncio.Event()
        self.done = asyncio.Event()
        self._chat = chat
        self._idle_s = idle_s
        self._answers: dict[str, asyncio.Task[Answered]] = {}
        self._turns = 0
        self._active = time.monotonic()
        self._failure: str | None = None

    async def answered(self, request: GatewayRequest) -> Answered:
        """Returns the turns that answer a request; raises GatewayError, or ValueError if the chat is not rendered."""
        digest = request.digest
        if self.done.is_set():
            raise GatewayError("the session has ended", 401)
        task = self._answers.get(digest)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._answers[digest] = asyncio.create_task(self._sampled(request))
        return await asyncio.shield(task)

    async def _sampled(self, request: GatewayRequest) -> Answered:
        if self._chat.turns_left < request.count:
            self._chat.cut_off("max_turns")
            raise GatewayError(_NO_ROOM)
        # Begun at once, each turn counts as one that is not left.
        loop = asyncio.get_running_loop()
        tasks: list[asyncio.Task[SessionTurn | None]] = []
        for _ in range(request.count):
            tasks.append(asyncio.Task(self._turn(request), loop=loop, eager_start=True))
        found = await asyncio.gather(*tasks, return_exceptions=True)
        turns: list[SessionTurn] = []
        for turn in found:
            if isinstance(turn, BaseException):
                raise turn
            if turn is None:
                if self._chat.closed:
                    raise GatewayError("the session has ended", 401)
                self._chat.cut_off()
                raise GatewayError(_NO_ROOM)
            self._turns += 1
            turns.append(replace(turn, action=replace(turn.action, tool_calls=self._readable_calls(turn))))
        self.begin()
        return turns, int(time.time())

    def _readable_calls(self, turn: SessionTurn) -> tuple[ToolCall, ...]:
        """Returns the calls that can be read, under ids that are unique in the session."""
        calls: list[ToolCall] = []
        for call in turn.action.tool_calls:
            if call.problem is None:
                call_id = f"call_{self._turns}_{len(calls)}"
                self.call_ids[call_id] = call.call_id
                calls.append(replace(call, call_id=call_id))
        return tuple(calls)

    async def _turn(self, request: GatewayRequest) -> SessionTurn | None:
        limit = request.max_tokens
        if request.prompt is not None:
            return await self._chat.complete(request.prompt, max_tokens=limit)
        return await self._chat.turn(request.messages, request.tools, max_tokens=limit)

    def begin(self) -> None:
        """Restarts the clock of the harness."""
        self._active = time.monotonic()

    def reward(self, value: float | None, done: bool) -> None:
        """Sets the reward of the last turn, once or again, and ends the session; raises GatewayError without a turn."""
        if not self._turns:
            raise GatewayError("the session has had no turn that a reward could be of", 409)
        if value is not None:
            self._chat.reward(value, anew=True)
            self.rewarded = True
        if done:
            self._end()

    def fail(self, reason: str) -> None:
        """Ends the session: the harness says why it has no reward."""
        self._failure = reason
        self._end()

    def _end(self) -> None:
        """Lets the session be over: turns that are being sampled are left out, though the harness has time to end."""
        self._chat.close()
        self.done.set()

    async def over(self) -> None:
        """Returns when the session is done; raises FailedEnvironmentError if it takes too long."""
        limit = f"environment.time_limit = {self._idle_s:g} s"
        while not self.done.is_set():
            remaining = self._idle_s
            if all(task.done() for task in self._answers.values()):
                remaining += self._active - time.monotonic()
            if remaining <= 0:
                asked = "asked for no turn" if self._turns else "has asked for no turn"
                raise FailedEnvironmentError(f"the harness {asked} for {limit}")
            with suppress(TimeoutError):
                await asyncio.wait_for(self.done.wait(), remaining)

    def cancel(self) -> None:
        """Ends turns in progress."""
        for task in self._answers.values():
            task.cancel()

    async def close(self) -> None:
        """Waits for turns in progress, which are left out: engines must not have them any more."""
        self._chat.close()
        await asyncio.gather(*self._answers.values(), return_exceptions=True)

    def check(self, rewarded_elsewhere: bool) -> None:
        """Raises FailedEnvironmentError if the conversation has nothing to score."""
        if self._failure is not None:
            raise FailedEnvironmentError(f"the harness: {self._failure}")
        if not self._turns:
            raise FailedEnvironmentError("the harness asked for no turn")
        if not self.rewarded and not rewarded_elsewhere:
            raise FailedEnvironmentError("the harness posted no reward, and the run has no other one")


async def run_harness(
    command: str | Sequence[str], variables: Mapping[str, str], session: GatewaySession, passed: Collection[str] = ()
) -> None:
    """Runs a harness until it ends or has said that its session is done; nothing of its process group is left.

    Args:
        passed: names of further variables of this process that the harness gets.

    Raises:
        FailedEnvironmentError: it does not start, fails or takes too long, with the
            end of its output.
    """
    words = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
    environment: dict[str, str] = {}
    for name, value in os.environ.items():
        if name in _PASSED or name in passed or name.lower().endswith("_proxy"):
            environment[name] = value
    if len(session.task.encode()) <= _LONGEST_TASK:
        environment["MEGARL_TASK"] = session.task
    environment |= variables
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=partial(end_with_parent, os.getpid()),
        )
    except OSError as error:
        raise FailedEnvironmentError(f"the harness {words[0]} does not start: {error.strerror}") from error
    assert process.stdout is not None
    output = bytearray()
    reading = asyncio.create_task(_read(process.stdout, output))
    ended = asyncio.create_task(process.wait())
    over = asyncio.create_task(session.over())
    status: int | None = None
    try:
        await asyncio.wait((ended, over), return_when=asyncio.FIRST_COMPLETED)
        if over.done() and over.exception() is None:
            await asyncio.wait((ended,), timeout=_GRACE_S)
        elif ended.done() and not session.done.is_set():
            status = ended.result()
        if over.done():
            over.result()
    except FailedEnvironmentError as error:
        raise FailedEnvironmentError(f"{error}{_shown(output)}") from error
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        over.cancel()
        await asyncio.wait((ended,), timeout=_GRACE_S)
        # A child that has left the group may hold the output open.
        await asyncio.wait((reading,), timeout=1.0 if ended.done() else 0)
        reading.cancel()
        if output:
            print(f"harness of {session.sample.sample_id}:{_shown(output)}", flush=True)
    if status:
        raise FailedEnvironmentError(f"the harness ended with {how_ended(status)}{_shown(output)}")


async def _read(stream: asyncio.StreamReader, output: bytearray) -> None:
    """Reads all output, and keeps the end."""
    while data := await stream.read(1 << 16):
        output += data
        del output[:-_KEPT_OUTPUT]


def _shown(output: bytearray) -> str:
    text = output.decode(errors="replace").strip()
    return f"\n{text}" if text else ""
