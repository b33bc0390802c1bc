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
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from megarl.conversations.chat_session import ChatSession, SessionTurn
from megarl.conversations.gateway.gateway_request import GatewayAnswer, GatewayError, TurnAsk
from megarl.environments.environment import EnvironmentTask, FailedEnvironmentError
from megarl.rewards.child_process import end_with_parent, how_ended

_LONGEST_TASK = 100_000
_PASSED: Final = frozenset(
    [
        "PATH",
        "HOME",
        "USER",
        "SHELL",
        "LANG",
        "LC_ALL",
        "LC_CTYPE",
        "TZ",
        "TMPDIR",
        "PYTHONPATH",
        "VIRTUAL_ENV",
        "LD_LIBRARY_PATH",
        "SSL_CERT_FILE",
        "MEGARL_SESSION",  # by which a run finds what has left the process group, when it ends
    ]
)
"""Of this process's environment: a harness may run what the model wrote, and gets none of the run's keys."""
_NO_ROOM: Final = (
    "prompt is too long, or there were too many turns: a conversation has environment.max_turns turns, each chat "
    "rollout.max_model_len tokens"
)
"""Bytes of a task in an environment variable; the kernel takes 128 KiB."""
_KEPT_OUTPUT = 16_384
_GRACE_S = 5.0
"""For a harness to end by itself, after it has said that its session is done."""


@dataclass(frozen=True, kw_only=True)
class Answered:
    """The turns that answer a request, and when: Unix time, seconds."""

    answers: Sequence[GatewayAnswer]
    created: int


class GatewaySession:
    """Answers the requests of one conversation.

    A request that was made before is answered by the same turns, also while they are being sampled: clients repeat
    requests that take long.

    Args:
        idle_s: the session fails if it asks for no turn for so long, and none is being sampled.

    Attributes:
        task: of the conversation, in JSON.
        temperature: None is that of the run.
        call_ids: the model's ids of its calls of tools, by those that clients are told.
    """

    def __init__(self, chat: ChatSession, task: EnvironmentTask, idle_s: float) -> None:
        self.name = secrets.token_hex(8)
        self.key = secrets.token_urlsafe(32)
        request = chat.conversation.request
        told = {"prompt_id": task.prompt_id, "messages": task.messages, "fields": task.fields, "seed": request.seed}
        self.sample_id = request.sample_id
        self.temperature = request.temperature
        self.task = json.dumps(told, default=str)
        self.call_ids: dict[str, str] = {}
        self.rewarded = False
        self._chat = chat
        self._idle_s = idle_s
        self._answers: dict[str, asyncio.Task[Answered]] = {}
        self._sampling = 0
        self._promised = 0  # turns whose tasks have not begun
        self._turns = 0
        self._active = time.monotonic()
        self._done = asyncio.Event()
        self._failure: str | None = None

    async def answered(self, ask: TurnAsk) -> Answered:
        """Returns the turns that answer a request; raises GatewayError, or ValueError if the chat is not rendered."""
        digest = ask.digest
        if self._done.is_set():
            raise GatewayError("the session has ended", 401)
        if digest not in self._answers:
            self._answers[digest] = asyncio.create_task(self._sampled(ask))
            self._answers[digest].add_done_callback(lambda task: self._forget_failed(digest, task))
        return await asyncio.shield(self._answers[digest])

    def _forget_failed(self, digest: str, task: asyncio.Task[Answered]) -> None:
        if task.cancelled() or task.exception() is not None:
            del self._answers[digest]

    async def _sampled(self, ask: TurnAsk) -> Answered:
        if self._chat.turns_left - self._promised < ask.count:
            self._chat.cut_off("max_turns")
            raise GatewayError(_NO_ROOM)
        self._promised += ask.count
        self._sampling += 1
        try:
            found = await asyncio.gather(*(self._turn(ask) for _ in range(ask.count)), return_exceptions=True)
        finally:
            self._sampling -= 1
        answers: list[GatewayAnswer] = []
        for turn in found:
            if isinstance(turn, BaseException):
                raise turn
            if turn is None:
                if self._chat.closed:
                    raise GatewayError("the session has ended", 401)
                self._chat.cut_off()
                raise GatewayError(_NO_ROOM)
            self._turns += 1
            calls = [call for call in turn.action.tool_calls if call.problem is None]
            told = [replace(call, call_id=f"call_{self._turns}_{index}") for index, call in enumerate(calls)]
            self.call_ids |= {call.call_id: own.call_id for call, own in zip(told, calls, strict=True)}
            answers.append(GatewayAnswer(turn=turn, calls=tuple(told)))
        self.begin()
        return Answered(answers=answers, created=int(time.time()))

    async def _turn(self, ask: TurnAsk) -> SessionTurn | None:
        self._promised -= 1
        if ask.prompt is not None:
            return await self._chat.complete(ask.prompt, most=ask.most)
        return await self._chat.answer(ask.messages, ask.tools, most=ask.most)

    @property
    def done(self) -> bool:
        """Whether the harness has said so."""
        return self._done.is_set()

    def begin(self) -> None:
        """Starts the clock of the harness."""
        self._active = time.monotonic()

    def reward(self, value: float | None, done: bool) -> None:
        """Sets the reward of the last turn, once or again, and ends the session; raises GatewayError without a turn."""
        if not self._turns:
            raise GatewayError("the session has had no turn that a reward could be of", 409)
        if value is not None:
            self._chat.reward(value, replace=True)
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
        self._done.set()

    async def over(self) -> None:
        """Returns when the session is done; raises FailedEnvironmentError if it takes too long."""
        while not self._done.is_set():
            left = self._idle_s if self._sampling else self._active + self._idle_s - time.monotonic()
            if left <= 0:
                asked = "asked for no turn" if self._turns else "has asked for no turn"
                raise FailedEnvironmentError(f"the harness {asked} for environment.time_limit = {self._idle_s:g} s")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._done.wait(), left)

    def cancel(self) -> None:
        """Ends turns in progress."""
        for task in self._answers.values():
            task.cancel()

    async def close(self) -> None:
        """Waits for turns in progress, which are left out: engines must not have them any more."""
        self._chat.close()
        turns = [task for task in self._answers.values() if not task.done()]
        await asyncio.gather(*turns, return_exceptions=True)

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
        command: a text is run by the shell.
        variables: of its environment.
        passed: names of further ones that it gets of this process's.

    Raises:
        FailedEnvironmentError: it does not start, fails or takes too long; the message has the end of its output.
    """
    words = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
    names = {name for name in os.environ if name in _PASSED or name.lower().endswith("_proxy")} | set(passed)
    kept = {name: os.environ[name] for name in names if name in os.environ}
    task = {"MEGARL_TASK": session.task} if len(session.task.encode()) <= _LONGEST_TASK else {}
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=kept | task | dict(variables),
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
        elif ended.done() and not session.done:
            status = ended.result()
        if over.done() and (failure := over.exception()) is not None:
            raise failure
    except FailedEnvironmentError as error:
        raise FailedEnvironmentError(f"{error}{_shown(output)}") from error
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        over.cancel()
        await asyncio.wait((ended,), timeout=_GRACE_S)
        await asyncio.wait((reading,), timeout=1.0 if ended.done() else 0)  # a child may have left the group
        reading.cancel()
        if output:
            print(f"harness of {session.sample_id}:{_shown(output)}", flush=True)
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
