"""The turns of a conversation: chats become ids that only grow, or begin a new branch."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.data.stream import stable_hash
from megarl.data.tokenizer import Message
from megarl.environments.chat import ChatRenderer
from megarl.environments.conversation import Branch, Conversation, SampledTurn
from megarl.environments.environment import Action
from megarl.types import Prompt, SampleRequest

Sample = Callable[[SampleRequest], Awaitable[SampledTurn]]
"""Lets an engine sample the answer to a request."""


@dataclass(frozen=True, kw_only=True)
class TurnLimits:
    """What ends a conversation.

    Args:
        context: tokens of a branch, its prompt included.
        turn: tokens that are sampled in a turn.
        turns: of a conversation.
    """

    context: int
    turn: int
    turns: int


@dataclass(kw_only=True)
class _Chat:
    """The messages of a branch, and its last turn."""

    branch: Branch
    messages: list[Message] = field(default_factory=list[Message])
    tools: Sequence[Mapping[str, Any]] = ()
    action: Action | None = None
    busy: bool = True


class ChatSession:
    """Samples the turns of a conversation, and records them.

    Turns may be sampled at the same time; those that continue the same ids begin branches.
    """

    def __init__(self, conversation: Conversation, renderer: ChatRenderer, sample: Sample, limits: TurnLimits) -> None:
        self.conversation = conversation
        self._renderer, self._sample, self._limits = renderer, sample, limits
        self._chats: list[_Chat] = []
        self._turns = 0

    async def turn(
        self,
        messages: Sequence[Message] | str,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        most: int | None = None,
        temperature: float | None = None,
    ) -> Action | None:
        """Samples the turn that follows a chat, and returns it; None where a limit leaves no room for it.

        Args:
            messages: the whole chat, or a text that follows all that was.
            most: tokens of the turn, if less than the limit.

        Raises:
            ValueError: the chat cannot be rendered.
        """
        if self._turns >= self._limits.turns:
            return None
        chat = self._continued(messages, tools)
        room = min(most or self._limits.turn, self._limits.turn, self._limits.context - len(chat.branch.ids))
        if room < 1:
            self._drop_unanswered(chat)
            return None
        number, self._turns = self._turns, self._turns + 1
        request = self.conversation.request
        sampled = await self._sample(
            dataclasses.replace(
                request,
                sample_id=f"{request.sample_id}/turn-{number}",
                prompt=Prompt(prompt_id=request.prompt.prompt_id, token_ids=chat.branch.ids),
                seed=stable_hash(request.seed, number),
                max_new_tokens=room,
                temperature=request.temperature if temperature is None else temperature,
            )
        )
        chat.action = self._renderer.read(sampled.token_ids, sampled.finished, prompt=chat.branch.ids, tools=chat.tools)
        chat.branch.add(sampled)
        chat.busy = False
        return chat.action

    def _drop_unanswered(self, chat: _Chat) -> None:
        chat.branch.drop_unanswered()
        if not chat.branch.turns:
            self._chats.remove(chat)
            self.conversation.branches.remove(chat.branch)

    def reward(self, value: float) -> None:
        """Adds to the reward of the last turn."""
        if self.conversation.branches and self.conversation.branch.rewards:
            self.conversation.branch.rewards[-1] += value

    def _continued(self, messages: Sequence[Message] | str, tools: Sequence[Mapping[str, Any]]) -> _Chat:
        """Returns the chat that the messages continue, with the ids of what follows its last turn, or a new one."""
        for chat in reversed(self._chats):
            if chat.busy or chat.action is None or not chat.action.finished:
                continue
            known = [*chat.messages, chat.action.message]
            prompt = chat.branch.ids[: len(chat.branch.ids) - len(chat.action.token_ids)]
            if isinstance(messages, str):
                given = self._renderer.follow((), chat.action, messages, prompt=prompt, tools=tools)
            elif chat.tools == tools and _same(known, messages[: len(known)]) and len(messages) > len(known):
                new = messages[len(known) :]
                given = self._renderer.follow(chat.messages, chat.action, new, prompt=prompt, tools=tools)
            else:
                continue
            if given is not None:
                chat.branch.give(given)
                chat.messages, chat.busy = [] if isinstance(messages, str) else list(messages), True
                return chat
        prompt = tuple(self._renderer.begin(messages, tools))
        known = [] if isinstance(messages, str) else list(messages)
        chat = _Chat(branch=Branch(prompt=prompt), messages=known, tools=tools)
        self._chats.append(chat)
        self.conversation.branches.append(chat.branch)
        return chat


def _same(known: Sequence[Message], given: Sequence[Message]) -> bool:
    """Returns whether messages are the same to a chat template."""
    return list(known) == list(given)
