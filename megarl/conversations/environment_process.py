"""Runs conversations: the environments in child processes that can be ended, the turns by the engines."""

from __future__ import annotations

import asyncio
import itertools
import traceback
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.config.schema import EnvironmentSettings
from megarl.conversations.chat import ChatRenderer
from megarl.conversations.chat_session import ChatSession, TurnLimits
from megarl.conversations.conversation import Branch, Conversation
from megarl.conversations.environment_calls import EnvironmentChild, EnvironmentChildren, LostEnvironmentError
from megarl.conversations.environment_child import Reply
from megarl.conversations.gateway.gateway_request import GatewayConfig
from megarl.data.packing import kept_columns, sample_infos
from megarl.data.tokenizer import Message, Tokenizer, load_tokenizer
from megarl.environments.environment import EnvironmentTask, FailedEnvironmentError
from megarl.errors import RunError
from megarl.remote import remote
from megarl.rewards.child_process import loop_in_thread
from megarl.texts import short_reason
from megarl.types import (
    Pickled,
    Prompt,
    Ragged,
    RolloutChunk,
    SampledTurn,
    SampleInfo,
    SampleRequest,
    TurnAnswer,
    WorkItem,
)

if TYPE_CHECKING:
    from megarl.conversations.gateway.gateway import Gateway

Generated = tuple[dict[int, RolloutChunk], list[SampleInfo]]
"""Chunks by number, and the samples in them."""
_HEARTBEAT_S = 5.0
"""A call for turns returns after this time, also without any."""
MAX_CRASHES = 10
"""Restarts of a conversation whose process another one crashed; after that it fails."""


@dataclass(frozen=True, kw_only=True)
class TurnRequest:
    """A turn that a conversation waits for.

    Args:
        conversation: sample id of the conversation's request.
        tokens: tokens of the prompt, and those that may be sampled.
    """

    number: int
    conversation: str
    tokens: int
    request: Pickled[SampleRequest]


class EnvironmentProcess:
    """Runs the conversations of work items, many at a time.

    The owner of the process lets engines sample the turns that `next_turns` returns, and hands them
    in with `answer`. An event loop in a thread has all conversations; methods are called in another
    thread, and return at once.

    Args:
        tokenizer: directory of the tokenizer.
        ends: ids that end turns.
    """

    def __init__(
        self,
        settings: EnvironmentSettings,
        tokenizer: str,
        template_arguments: Mapping[str, Any],
        limits: TurnLimits,
        ends: Collection[int] = (),
        gateway: GatewayConfig | None = None,
    ) -> None:
        self._settings = settings
        self._limits = limits
        self._ends = ends
        self._gateway_config = gateway
        self._gateway: Gateway | None = None
        self._tokenizer_directory = tokenizer
        self._template_arguments = template_arguments
        self._children = EnvironmentChildren(settings)
        self._loop = loop_in_thread()
        self._numbers = itertools.count()
        self._turns: list[TurnRequest] = []
        self._sampling: dict[int, asyncio.Future[SampledTurn]] = {}
        self._news = asyncio.Event()  # a turn to sample, or no further conversation
        self._running = 0
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._tokenizer: Tokenizer
        self._renderer: ChatRenderer

    @remote(phase="start")
    def start(self, host: str = "127.0.0.1") -> None:
        """Loads the tokenizer and the environment, and listens with a gateway; a RunError if that fails."""
        self._tokenizer = load_tokenizer(self._tokenizer_directory)
        self._renderer = ChatRenderer(
            self._tokenizer,
            self._template_arguments,
            ends=self._ends,
            history=self._settings.history,
            context=self._limits.context,
        )
        if self._gateway_config is None:
            self._run(self._children.start()).result()
            return
        from megarl.conversations.gateway.gateway import Gateway

        self._gateway = Gateway(self._settings, self._gateway_config, self._tokenizer)
        self._run(self._gateway.start(host)).result()

    def _run[T](self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def step(self) -> bool:
        """Does nothing: the event loop runs in another thread."""
        return False

    @remote(phase="rollout")
    def generate(self, item: WorkItem) -> Future[Generated]:
        """Starts one conversation per request; the chunk comes when all of them have ended."""
        return self._run(self._generate(item))

    @remote(phase="rollout")
    def next_turns(self) -> Future[list[TurnRequest]]:
        """Returns turns to sample, as soon as there are any; none without conversations, or for a heartbeat."""
        return self._run(self._next_turns())

    @remote(phase="rollout")
    def answer(self, answers: Sequence[TurnAnswer]) -> None:
        """Hands in turns, under the numbers of their requests."""
        turns = {answer.number: answer.turn.value() for answer in answers}
        self._loop.call_soon_threadsafe(self._answered, turns)

    @remote(phase="start")
    def close(self) -> None:
        """Ends the child processes and their children, or the harnesses; conversations stop where they are."""
        if self._gateway is not None:
            self._run(self._gateway.close()).result()
        self._run(self._children.close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _next_turns(self) -> list[TurnRequest]:
        if self._running and not self._turns:
            self._news.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), _HEARTBEAT_S)
        turns = self._turns
        self._turns = []
        return turns

    def _answered(self, turns: Mapping[int, SampledTurn]) -> None:
        for number, turn in turns.items():
            waiting = self._sampling.pop(number, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(turn)

    async def _sample(self, conversation: str, request: SampleRequest) -> SampledTurn:
        number = next(self._numbers)
        turn = self._sampling[number] = self._loop.create_future()
        tokens = len(request.prompt.token_ids) + (request.max_new_tokens or self._limits.turn)
        pickled = Pickled.of(request)
        self._turns.append(TurnRequest(number=number, conversation=conversation, tokens=tokens, request=pickled))
        self._news.set()
        return await turn

    async def _generate(self, item: WorkItem) -> Generated:
        self._running += 1
        try:
            conversations = await asyncio.gather(*(self._converse(request) for request in item.requests))
        finally:
            self._running -= 1
            if not self._running:
                self._news.set()
        chunk, names = pack_conversations(conversations, self._tokenizer.end_token_id)
        outcomes = {each.request.sample_id: each.outcome for each in conversations}
        infos = sample_infos(item.chunk, chunk, names)
        infos = [replace(info, outcome=outcomes[info.conversation]) for info in infos]
        return {item.chunk: chunk}, infos

    async def _converse(self, request: SampleRequest) -> Conversation:
        """Runs a conversation; one that fails, or that lost its process with others (no failure), begins anew."""
        failures = 0
        crashes = 0
        child: EnvironmentChild | None = None
        async with self._slots:
            while True:
                conversation = Conversation(request=request)
                place = child
                child = None
                try:
                    await self._attempt(conversation, place)
                    return conversation
                except LostEnvironmentError as error:
                    child = error.child
                    crashes += 1
                    reason = str(error)
                    if not error.alone and crashes < MAX_CRASHES:
                        continue
                except RunError:
                    raise
                except (FailedEnvironmentError, ValueError) as error:
                    reason = str(error)
                except Exception as error:  # also of a library that reads what the model has written
                    reason = "".join(traceback.format_exception(error)[-8:])
                conversation.failure = short_reason(reason)
                failures += 1
                print(f"conversation {request.sample_id} failed: {conversation.failure}", flush=True)
                if failures > self._settings.retries:
                    return conversation

    async def _attempt(self, conversation: Conversation, child: EnvironmentChild | None) -> None:
        request = conversation.request
        number = next(self._numbers)
        sample = partial(self._sample, request.sample_id)
        session = ChatSession(conversation, self._renderer, sample, self._limits)
        task = task_of(request.prompt, self._tokenizer)
        if self._gateway is not None:
            await self._gateway.converse(session, task)
            return
        async with self._children.place(child) as place:
            call = partial(place.call, number)
            try:
                reply = await call("reset", task, request.seed)
                await self._take_turns(session, call, reply)
            except Exception:
                with suppress(FailedEnvironmentError):
                    await call("close")
                raise
            try:
                await call("close")
            except LostEnvironmentError as error:
                if error.alone:
                    raise

    async def _take_turns(self, session: ChatSession, call: Callable[..., Awaitable[Reply]], reply: Reply) -> None:
        """Takes turns until the environment or a limit ends the conversation."""
        chat: list[Message] = []
        has_text = False
        while not (reply.observation.done or reply.observation.truncated):
            given = reply.observation.messages
            if isinstance(given, str):
                has_text = True
            elif has_text:
                raise FailedEnvironmentError("step returned messages after a text, which no chat has: return texts")
            else:
                chat = [*chat, *given]
                given = chat
            turn = await session.turn(given, reply.tools)
            if turn is None:
                session.cut_off()
                return
            reply = await call("step", turn.action)
            session.reward(reply.observation.reward)
            session.conversation.metrics.update(reply.observation.metrics)
            chat.append(turn.action.message)
            if not turn.action.finished:
                return
        if reply.observation.truncated:
            session.cut_off()


def task_of(prompt: Prompt, tokenizer: Tokenizer) -> EnvironmentTask:
    """Builds the task of a data row."""
    messages = prompt.messages or ()
    if prompt.token_ids and not messages:
        text = "" if prompt.messages is not None else tokenizer.decode(prompt.token_ids)
        messages = [{"role": "user", "content": text}]
    return EnvironmentTask(prompt_id=prompt.prompt_id, messages=messages, fields=prompt.fields)


def pack_conversations(conversations: Sequence[Conversation], filler: int) -> tuple[RolloutChunk, list[str]]:
    """Returns a chunk with a row per branch, and each row's prompt id; `filler` stands for a prompt that failed."""
    branches: list[Branch] = []
    sample_ids: list[str] = []
    prompt_ids: list[str] = []
    rewards: list[float] = []
    for conversation in conversations:
        conversation.drop_unanswered(filler)
        request = conversation.request
        for number, branch in enumerate(conversation.branches):
            branches.append(branch)
            sample_ids.append(f"{request.sample_id}#{number}" if number else request.sample_id)
            prompt_ids.append(request.prompt.prompt_id)
            rewards.append(conversation.reward)
    chunk = RolloutChunk(
        sample_ids=tuple(sample_ids),
        prompt_ids=Ragged.from_rows((branch.prompt for branch in branches), np.int32),
        response_ids=Ragged.from_rows((branch.response for branch in branches), np.int32),
        rollout_logprobs=Ragged.from_rows((branch.logprobs for branch in branches), np.float32),
        finished=np.array([branch.finished for branch in branches], dtype=np.bool_),
        versions=tuple(tuple(branch.versions) for branch in branches),
        loss_mask=Ragged.from_rows((branch.loss_mask for branch in branches), np.bool_),
        rewards=np.array(rewards, dtype=np.float32),
        turns=Ragged.from_rows((branch.turns for branch in branches), np.int32),
        turn_rewards=Ragged.from_rows((branch.rewards for branch in branches), np.float64),
        **kept_columns(branches),
    )
    return chunk, prompt_ids
