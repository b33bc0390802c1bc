"""The turns of a conversation: chats become ids that only grow, or begin a new branch."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from megarl.conversations.chat import ChatRenderer
from megarl.conversations.conversation import Branch, Conversation
from megarl.conversations.tool_calls import Schemas
from megarl.data.stream import stable_hash
from megarl.data.tokenizer import Message, TextTooLongError
from megarl.environments.environment import Action, Messages
from megarl.types import Prompt, SampledTurn, SampleRequest

Sample = Callable[[SampleRequest], Awaitable[SampledTurn]]
"""Lets an engine sample the answer to a request."""


@dataclass(frozen=True, kw_only=True)
class TurnLimits:
    """What ends a conversation.

    Args:
        context: maximum tokens of a branch, its prompt included.
        turn: maximum tokens sampled in a turn.
        turns: maximum turns of a conversation.
        min_turn: minimum tokens for which a turn needs room.
    """

    context: int
    turn: int
    turns: int
    min_turn: int = 0


@dataclass(frozen=True, kw_only=True)
class SessionTurn:
    """A turn with what the model had read, and the log-probabilities of its tokens, nats."""

    action: Action
    prompt: tuple[int, ...]
    logprobs: tuple[float, ...]


_Found = tuple[Branch, list[Message]]
"""The branch of a turn, and its messages before the turn."""
_Find = Callable[[], Awaitable[_Found]]


class ChatSession:
    """Samples the turns of a conversation, and records them.

    Turns may be sampled at the same time; those that continue the same ids begin branches. Chats
    are rendered in threads, one at a time in a session, so that a long one holds up no other
    session.
    """

    def __init__(self, conversation: Conversation, renderer: ChatRenderer, sample: Sample, limits: TurnLimits) -> None:
        self.conversation = conversation
        self._renderer = renderer
        self._sample = sample
        self._limits = limits
        self._branches: list[Branch] = []  # the newest first
        self._turns = 0
        self._preparing = 0  # turns that are not yet sampled
        self._rendering = asyncio.Lock()
        self._last: Branch | None = None  # of the last turn
        self._repeats: Counter[str] = Counter()  # turns after the same ids
        self.closed = False

    @property
    def turns_left(self) -> int:
        return self._limits.turns - self._turns - self._preparing

    def close(self) -> None:
        """Ends the conversation: turns that are being sampled are left out of it."""
        self.closed = True

    async def turn(
        self,
        messages: Messages,
        tools: Schemas = (),
        *,
        max_tokens: int | None = None,
    ) -> SessionTurn | None:
        """Samples the turn that follows a chat; None where a limit leaves no room, a ValueError if it is not rendered.

        Args:
            messages: the whole chat, or a text that follows the last turn.
        """
        return await self._taken(partial(self._continued, messages, tools), max_tokens)

    async def complete(self, prompt: Sequence[int] | str, *, max_tokens: int | None = None) -> SessionTurn | None:
        """Samples what follows a prompt, whose ids continue a branch if they begin with all of the branch's."""
        return await self._taken(partial(self._completed, prompt), max_tokens)

    async def _taken(self, find: _Find, max_tokens: int | None) -> SessionTurn | None:
        """Finds the chat of a turn, which is not busy until it is sampled, and samples the turn."""
        if not self.turns_left:
            self.conversation.limit = "max_turns"
            return None
        self._preparing += 1
        try:
            async with self._rendering:
                branch, messages = await find()
        except TextTooLongError:
            self.conversation.limit = "max_model_len"
            return None
        finally:
            self._preparing -= 1
        turn = await self._sampled(branch, max_tokens)
        if turn is not None:
            branch.messages = messages
        return turn

    async def _sampled(self, branch: Branch, max_tokens: int | None) -> SessionTurn | None:
        prompt = branch.ids
        limits = {
            "max_new_tokens": self._limits.turn,
            "max_model_len": self._limits.context - len(prompt),
            "request": max_tokens or self._limits.turn,
        }
        limit = min(limits, key=limits.__getitem__)
        room = limits[limit]
        if self.closed or room < max(1, self._limits.min_turn):
            self.conversation.limit = limit
            self._drop_unanswered(branch)
            return None
        whole = self.conversation.request
        request = replace(
            whole,
            sample_id=f"{whole.sample_id}/turn-{self._turns}",
            prompt=Prompt(prompt_id=whole.prompt.prompt_id, token_ids=prompt),
            seed=self._seed(prompt),
            max_new_tokens=room,
        )
        self._turns += 1
        branch.busy = True
        try:
            sampled = await self._sample(request)
            if self.closed:
                self._drop_unanswered(branch)
                return None
            ids = sampled.token_ids
            branch.action = self._renderer.read(ids, sampled.finished, prompt=prompt, tools=branch.tools)
        except BaseException:  # it was canceled, or the turn cannot be read: the session may continue
            self._drop_unanswered(branch)
            raise
        finally:
            branch.busy = False
        branch.add(sampled)
        self._last = branch
        self.conversation.limit = None if sampled.finished else limit
        self.conversation.branches.remove(branch)
        self.conversation.branches.append(branch)  # the last one is that of the last turn
        logprobs = tuple(sampled.logprobs.tolist())
        return SessionTurn(action=branch.action, prompt=prompt, logprobs=logprobs)

    def _seed(self, prompt: tuple[int, ...]) -> int:
        """Returns the seed of a turn: it depends on what is before the turn, and not on when it is sampled."""
        ids = np.array(prompt, np.int32).tobytes()
        digest = hashlib.blake2b(ids, digest_size=16).hexdigest()
        self._repeats[digest] += 1
        return stable_hash(self.conversation.request.seed, digest, self._repeats[digest])

    def _drop_unanswered(self, branch: Branch) -> None:
        branch.drop_unanswered()
        if not branch.turns:
            self._branches.remove(branch)
            self.conversation.branches.remove(branch)

    def reward(self, value: float, *, anew: bool = False) -> None:
        """Adds to the reward of the last turn, or replaces it."""
        if self._last is None:
            return
        if not anew:
            value += self._last.rewards[-1]
        self._last.rewards[-1] = value

    def cut_off(self, limit: str = "environment") -> None:
        """Notes that a limit has ended the branch of the last turn; an earlier noted one stays."""
        self.conversation.limit = self.conversation.limit or limit
        if self._last is not None:
            self._last.finished = False

    async def _completed(self, prompt: Sequence[int] | str) -> _Found:
        """Returns the longest branch that a prompt continues, with its ids, or a new one."""
        if isinstance(prompt, str):
            prompt = await asyncio.to_thread(self._renderer.begin, prompt, ())
        ids = tuple(prompt)
        if not ids:
            raise ValueError("the prompt has no token")
        for branch in sorted(self._branches, key=lambda branch: -len(branch.ids)):
            known = branch.ids
            if not branch.busy and ids[: len(known)] == known:
                branch.give(ids[len(known) :])
                break
        else:
            branch = self._new(ids)
        branch.by_ids = True
        return branch, branch.messages

    async def _continued(self, messages: Messages, tools: Schemas) -> _Found:
        """Returns the branch that the messages continue, with the ids that follow, or a new one.

        The messages come with it, the model's as the model wrote them. Of branches that they
        begin with, only the longest are rendered: a template that has rewritten a turn would else
        be rendered again for each earlier branch.
        """
        longest = 0
        for branch in sorted(self._branches, key=lambda branch: -len(branch.messages)):
            if branch.busy or branch.action is None or not branch.action.finished:
                continue
            if len(branch.messages) < longest:
                break
            known: list[Message] = []
            rest = messages
            if not isinstance(messages, str):
                known = [*branch.messages, branch.action.message]
                if branch.by_ids or branch.tools != tools or not _begins_with(messages, known):
                    continue
                rest = messages[len(known) :]
                longest = len(branch.messages)
            ids = branch.ids
            prompt = ids[: len(ids) - len(branch.action.token_ids)]
            follow = partial(self._renderer.follow, prompt=prompt, tools=tools)
            given = await asyncio.to_thread(follow, branch.messages, branch.action, rest)
            if given is not None:
                branch.give(given)
                return branch, [] if isinstance(rest, str) else [*known, *rest]
        prompt = await asyncio.to_thread(self._renderer.begin, messages, tools)
        branch = self._new(tuple(prompt))
        branch.tools = tools
        return branch, [] if isinstance(messages, str) else list(messages)

    def _new(self, prompt: tuple[int, ...]) -> Branch:
        branch = Branch(prompt=prompt)
        self._branches.insert(0, branch)
        self.conversation.branches.append(branch)
        return branch


def _begins_with(messages: Sequence[Message], known: Sequence[Message]) -> bool:
    """Whether messages continue those of a branch, up to its last turn."""
    return len(messages) > len(known) and all(map(_is_same_message, known, messages))


def _is_same_message(known: Message, given: Message) -> bool:
    """Whether a message is a known one; clients may leave out thoughts when they send back the model's messages."""
    if known == given:
        return True
    if known["role"] != "assistant" or "reasoning_content" in given:
        return False
    return {name: value for name, value in known.items() if name != "reasoning_content"} == given
