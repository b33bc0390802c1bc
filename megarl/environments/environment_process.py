"""Runs conversations: the environments in a child process that can be ended, the turns by the engines."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.config.schema import EnvironmentSettings
from megarl.data.packing import Chunks, sample_infos
from megarl.data.tokenizer import Message, Tokenizer, load_tokenizer
from megarl.environments.chat import ChatRenderer
from megarl.environments.chat_session import ChatSession, TurnLimits
from megarl.environments.conversation import Conversation, SampledTurn
from megarl.environments.environment import EnvironmentTask, FailedEnvironmentError
from megarl.environments.environment_child import CallFailure, EnvironmentCall, Method, Reply
from megarl.environments.family_renderer import find_renderer
from megarl.environments.gateway_request import GatewayPlace
from megarl.errors import RunError
from megarl.remote import remote
from megarl.rewards.reward_worker import ChildProcess
from megarl.types import Prompt, Ragged, RolloutChunk, SampleInfo, SampleRequest, WorkItem

if TYPE_CHECKING:
    from megarl.environments.gateway import Gateway

_HEARTBEAT_S = 5.0
"""A call for turns returns after this time, also without any."""


class LostEnvironmentError(FailedEnvironmentError):
    """An environment is gone with its process, which another conversation ended."""


@dataclass(frozen=True, kw_only=True)
class TurnRequest:
    """A turn that a conversation waits for.

    Args:
        number: unique in its process.
        conversation: the sample id of its request.
    """

    number: int
    conversation: str
    request: SampleRequest


class EnvironmentChild:
    """The child process of the environments; all methods are called in one event loop."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        self._process = ChildProcess("megarl.environments.environment_child", settings, "environments")
        self._limit_s = settings.time_limit
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Reply | CallFailure]] = {}
        self._reader: threading.Thread | None = None
        self._connection: Connection[Any, Any] | None = None

    def start(self, deadline: float = math.inf) -> None:
        """Starts the child if it is not running; a RunError if the environment cannot be loaded by the deadline."""
        self._connection = self._process.start(deadline)

    async def call(self, conversation: int, method: Method, *args: Any) -> Reply:
        """Calls a method of a conversation's environment.

        Raises:
            FailedEnvironmentError: it failed, took too long or ended the process.
            LostEnvironmentError: another conversation ended the process.
        """
        if self._reader is None:
            self.start(time.monotonic() + self._limit_s)
            assert self._connection is not None
            reading = (asyncio.get_running_loop(), self._connection)
            self._reader = threading.Thread(target=self._read, args=reading, daemon=True)
            self._reader.start()
        assert self._connection is not None
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        call = EnvironmentCall(number=number, conversation=conversation, method=method, args=args)
        try:
            self._connection.send(call)
            reply = await asyncio.wait_for(answer, self._limit_s)
        except TimeoutError:
            self._end(f"another call of its process took longer than {self._limit_s:g} s", lost=True)
            raise FailedEnvironmentError(
                f"{method} took longer than environment.time_limit = {self._limit_s:g} s"
            ) from None
        except OSError as error:
            self._end()
            raise LostEnvironmentError(f"its process has ended: {error}") from error
        finally:
            self._waiting.pop(number, None)
        if isinstance(reply, CallFailure):
            raise (LostEnvironmentError if reply.lost else FailedEnvironmentError)(reply.reason)
        return reply

    @property
    def running(self) -> bool:
        return self._reader is not None

    def close(self) -> None:
        self._process.close()

    def _end(self, reason: str = "", *, lost: bool = False) -> None:
        """Ends the child, and fails all calls in progress; the next one gets a new child."""
        self._reader = None
        status = self._process.close()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_result(CallFailure(reason=reason or f"its process ended with {status}", lost=lost))

    def _read(self, loop: asyncio.AbstractEventLoop, connection: Connection[Any, Any]) -> None:
        """Runs in a thread: hands answers to the event loop, until the child ends."""
        while True:
            try:
                number, answer = connection.recv()
            except Exception:  # it has ended, is closed meanwhile, or has sent what cannot be read here
                loop.call_soon_threadsafe(self._lost, connection)
                return
            loop.call_soon_threadsafe(self._answered, number, answer)

    def _answered(self, number: int, answer: Reply | CallFailure) -> None:
        if (waiting := self._waiting.get(number)) is not None and not waiting.done():
            waiting.set_result(answer)

    def _lost(self, connection: Connection[Any, Any]) -> None:
        if connection is self._connection and self._reader is not None:
            self._end()


class EnvironmentProcess:
    """Runs the conversations of work items, many at a time.

    Who owns the process lets engines sample the turns that `next_turns` returns, and hands them in with `answer`. An
    event loop in a thread has all conversations; methods are called in another thread, and return at once.

    Args:
        tokenizer: directory.
        template_arguments: of the chat template.
        ends: ids that end turns.
        place: of the gateway, if the environment is one.
    """

    def __init__(
        self,
        settings: EnvironmentSettings,
        tokenizer: str,
        template_arguments: Mapping[str, Any],
        limits: TurnLimits,
        ends: Collection[int] = (),
        place: GatewayPlace | None = None,
    ) -> None:
        self._settings, self._limits, self._ends, self._place = settings, limits, ends, place
        self._gateway: Gateway | None = None
        self._tokenizer_directory, self._template_arguments = tokenizer, template_arguments
        self._child = EnvironmentChild(settings)
        self._loop = asyncio.new_event_loop()
        self._numbers = itertools.count()
        self._turns: list[TurnRequest] = []
        self._sampling: dict[int, asyncio.Future[SampledTurn]] = {}
        self._asked: Future[list[TurnRequest]] | None = None
        self._running = 0
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._tokenizer: Tokenizer
        self._renderer: ChatRenderer

    @remote(phase="start")
    def start(self, host: str = "127.0.0.1") -> None:
        """Loads the tokenizer and the environment; a RunError if that fails.

        Args:
            host: at which a gateway listens.
        """
        self._tokenizer = load_tokenizer(self._tokenizer_directory)
        self._renderer = find_renderer(
            self._tokenizer, self._template_arguments, ends=self._ends, history=self._settings.history
        )
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        if self._place is None:
            self._child.start()
            return
        from megarl.environments.gateway import make_gateway

        self._gateway = make_gateway(self._settings, self._place, self._tokenizer)
        asyncio.run_coroutine_threadsafe(self._gateway.start(host), self._loop).result()

    def step(self) -> bool:
        """Does nothing: the event loop has a thread of its own."""
        return False

    @remote(phase="rollout")
    def generate(self, item: WorkItem) -> Future[tuple[dict[int, RolloutChunk], list[SampleInfo]]]:
        """Starts one conversation per request; the chunk comes when all of them have ended."""
        return asyncio.run_coroutine_threadsafe(self._generate(item), self._loop)

    @remote(phase="rollout")
    def next_turns(self) -> Future[list[TurnRequest]]:
        """Returns turns to sample, as soon as there are any; none where no conversation is left, or for a heartbeat."""
        asked: Future[list[TurnRequest]] = Future()
        self._loop.call_soon_threadsafe(self._ask, asked)
        return asked

    @remote(phase="rollout")
    def answer(self, number: int, rollouts: Chunks[RolloutChunk]) -> None:
        """Hands in a turn, the row of the first chunk."""
        self._loop.call_soon_threadsafe(self._answered, number, SampledTurn.of(rollouts[0]))

    @remote(phase="start")
    def close(self) -> None:
        """Ends the child process and its children, or the harnesses."""
        self._child.close()
        if self._gateway is not None:
            asyncio.run_coroutine_threadsafe(self._gateway.close(), self._loop).result()

    def _ask(self, asked: Future[list[TurnRequest]]) -> None:
        self._asked = asked
        self._loop.call_later(_HEARTBEAT_S, self._hand_out, asked)
        if self._turns or not self._running:
            self._hand_out(asked)

    def _hand_out(self, asked: Future[list[TurnRequest]] | None) -> None:
        """Answers a call for turns that has no answer yet."""
        if asked is not None and asked is self._asked:
            turns, self._turns, self._asked = self._turns, [], None
            asked.set_result(turns)

    def _answered(self, number: int, turn: SampledTurn) -> None:
        if (waiting := self._sampling.pop(number, None)) is not None and not waiting.done():
            waiting.set_result(turn)

    async def _sample(self, conversation: str, request: SampleRequest) -> SampledTurn:
        number = next(self._numbers)
        turn = self._sampling[number] = self._loop.create_future()
        self._turns.append(TurnRequest(number=number, conversation=conversation, request=request))
        self._loop.call_soon(lambda: self._hand_out(self._asked))  # with those of the same moment
        return await turn

    async def _generate(self, item: WorkItem) -> tuple[dict[int, RolloutChunk], list[SampleInfo]]:
        self._running += 1
        try:
            conversations = await asyncio.gather(*(self._converse(request) for request in item.requests))
        finally:
            self._running -= 1
            self._hand_out(None if self._running else self._asked)
        chunk, names = pack_conversations(conversations, self._tokenizer.end_token_id)
        outcomes = {conversation.request.sample_id: conversation.outcome for conversation in conversations}
        infos = sample_infos(item.chunk, chunk, names)
        return {item.chunk: chunk}, [replace(info, outcome=outcomes[info.conversation]) for info in infos]

    async def _converse(self, request: SampleRequest) -> Conversation:
        """Runs a conversation; one that fails begins anew, as often as the configuration says.

        So does one whose process another conversation has ended, which does not count.
        """
        failures = 0
        async with self._slots:
            while True:
                conversation = Conversation(request=request)
                try:
                    await self._attempt(conversation)
                except LostEnvironmentError:
                    continue
                except RunError:
                    raise
                except Exception as error:  # also of a library that reads what the model has written
                    told = isinstance(error, FailedEnvironmentError | ValueError)
                    reason = str(error) if told else "".join(traceback.format_exception(error)[-8:])
                    conversation.failure, failures = reason, failures + 1
                    print(f"conversation {request.sample_id} failed: {reason}", flush=True)
                if conversation.failure is None or failures > self._settings.retries:
                    return conversation

    async def _attempt(self, conversation: Conversation) -> None:
        request, number = conversation.request, next(self._numbers)
        session = ChatSession(conversation, self._renderer, partial(self._sample, request.sample_id), self._limits)
        task = task_of(request.prompt, self._tokenizer)
        if self._gateway is not None:
            await self._gateway.converse(session, task)
            return
        try:
            reply = await self._child.call(number, "reset", task, request.seed)
            await self._turns_of(session, number, reply)
        finally:
            if self._child.running:
                with suppress(FailedEnvironmentError):
                    await self._child.call(number, "close")

    async def _turns_of(self, session: ChatSession, number: int, reply: Reply) -> None:
        """Takes turns until the environment or a limit ends the conversation."""
        chat: list[Message] = []
        while not (reply.observation.done or reply.observation.truncated):
            given = reply.observation.messages
            chat = chat if isinstance(given, str) else [*chat, *given]
            action = await session.turn(given if isinstance(given, str) else chat, reply.tools)
            if action is None:
                session.cut_off()
                return
            reply = await self._child.call(number, "step", action)
            session.reward(reply.observation.reward)
            session.conversation.metrics.update(reply.observation.metrics)
            chat.append(action.message)
            if not action.finished:
                return
        if reply.observation.truncated:
            session.cut_off()


def task_of(prompt: Prompt, tokenizer: Tokenizer) -> EnvironmentTask:
    """Returns what an environment is told of a row."""
    text = "" if prompt.messages is not None else tokenizer.decode(prompt.token_ids)
    user: list[Message] = [{"role": "user", "content": text}] if prompt.token_ids else []
    return EnvironmentTask(prompt_id=prompt.prompt_id, messages=prompt.messages or user, fields=prompt.fields)


def pack_conversations(conversations: Sequence[Conversation], filler: int) -> tuple[RolloutChunk, list[str]]:
    """Returns the chunk of some conversations, a row per branch, and the prompt id of each row.

    The last turn of a branch also has the rewards of later branches, for which it has prepared.

    Args:
        filler: the prompt of one that failed before its first turn.
    """
    for own in conversations:
        own.drop_unanswered(filler)
    rows = [(own, number, branch) for own in conversations for number, branch in enumerate(own.branches)]
    branches = [branch for _, _, branch in rows]
    chunk = RolloutChunk(
        sample_ids=tuple(own.request.sample_id + (f"#{number}" if number else "") for own, number, _ in rows),
        prompt_ids=Ragged.from_rows((branch.prompt for branch in branches), np.int32),
        response_ids=Ragged.from_rows((branch.response for branch in branches), np.int32),
        rollout_logprobs=Ragged.from_rows((branch.logprobs for branch in branches), np.float32),
        finished=np.array([branch.finished for branch in branches], dtype=np.bool_),
        versions=tuple(tuple(branch.versions) for branch in branches),
        loss_mask=Ragged.from_rows((branch.loss_mask for branch in branches), np.bool_),
        rewards=np.array([own.reward for own, _, _ in rows], dtype=np.float32),
        turns=Ragged.from_rows((branch.turns for branch in branches), np.int32),
        turn_rewards=Ragged.from_rows((own.rewards_from(number) for own, number, _ in rows), np.float32),
    )
    return chunk, [own.request.prompt.prompt_id for own, _, _ in rows]
