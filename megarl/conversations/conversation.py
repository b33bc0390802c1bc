"""The record of a conversation: the ids that the model has read and written, exactly as they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megarl.conversations.tool_calls import Schemas
from megarl.data.tokenizer import Message
from megarl.environments.environment import Action
from megarl.types import ConversationOutcome, SampledTurn, SampleRequest, VersionSpan


@dataclass(kw_only=True, eq=False)
class Branch:
    """Ids that only grow: a prompt, and then turns with what was given between them.

    Args:
        loss_mask: whether each id of the response was sampled.
        logprobs: log-probabilities of the sampled ids, nats.
        kept_counts, kept_ids: see ``RolloutChunk``; None before the first turn, and where they are not recorded.
        turns: numbers of sampled ids up to the end of each turn.
        messages, tools: chat before the last turn, which is `action`.
        busy: whether a turn is being sampled.
        by_ids: whether a prompt of ids was completed, which is not in the messages.
    """

    prompt: tuple[int, ...]
    response: list[int] = field(default_factory=list[int])
    loss_mask: list[bool] = field(default_factory=list[bool])
    logprobs: list[float] = field(default_factory=list[float])
    kept_counts: list[int] | None = None
    kept_ids: list[int] | None = None
    versions: list[VersionSpan] = field(default_factory=list[VersionSpan])
    turns: list[int] = field(default_factory=list[int])
    rewards: list[float] = field(default_factory=list[float])
    finished: bool = False
    messages: list[Message] = field(default_factory=list[Message])
    tools: Schemas = ()
    action: Action | None = None
    busy: bool = False
    by_ids: bool = False

    @property
    def ids(self) -> tuple[int, ...]:
        """All ids, the prompt of the next turn."""
        return (*self.prompt, *self.response)

    def give(self, ids: Sequence[int]) -> None:
        """Adds ids that the model did not write."""
        self.response += ids
        self.loss_mask += [False] * len(ids)

    def add(self, turn: SampledTurn) -> None:
        """Adds what the model has written."""
        start = len(self.logprobs)
        self.response += turn.token_ids
        self.loss_mask += [True] * len(turn.token_ids)
        self.logprobs += turn.logprobs.tolist()
        if turn.kept_counts is not None and turn.kept_ids is not None:
            if self.kept_counts is None or self.kept_ids is None:
                self.kept_counts = []
                self.kept_ids = []
            self.kept_counts += turn.kept_counts.tolist()
            self.kept_ids += turn.kept_ids.tolist()
        for span in turn.versions:
            self.versions.append(replace(span, start=start + span.start, stop=start + span.stop))
        self.turns.append(len(self.logprobs))
        self.rewards.append(0.0)
        self.finished = turn.finished

    def drop_unanswered(self) -> None:
        """Removes what was given after the last turn; the model has answered nothing to it."""
        while self.loss_mask and not self.loss_mask[-1]:
            self.response.pop()
            self.loss_mask.pop()


@dataclass(kw_only=True)
class Conversation:
    """A conversation of one request.

    Args:
        failure: reason why the conversation has no score; None if it has one.
        limit: what kept the model from ending its last turn, or from taking another one.
    """

    request: SampleRequest
    branches: list[Branch] = field(default_factory=list[Branch])
    failure: str | None = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    limit: str | None = None

    @property
    def branch(self) -> Branch:
        """The branch of the last turn."""
        return self.branches[-1]

    @property
    def turns(self) -> int:
        return sum(len(branch.turns) for branch in self.branches)

    def drop_unanswered(self, filler: int) -> None:
        """Removes what no turn follows; a conversation without a turn has failed, and gets a prompt of one id."""
        for branch in self.branches:
            branch.drop_unanswered()
        self.branches = [branch for branch in self.branches if branch.turns]
        if not self.branches:
            self.failure = self.failure or "its first prompt leaves no room for a turn"
            self.branches = [Branch(prompt=(filler,))]

    @property
    def outcome(self) -> ConversationOutcome:
        truncated = self.failure is None and not self.branch.finished
        return ConversationOutcome(
            turns=self.turns,
            truncated=truncated,
            failure=self.failure,
            metrics=self.metrics,
            limit=self.limit if truncated else None,
        )

    @property
    def reward(self) -> float:
        """The sum over all turns; NaN of a failed conversation."""
        if self.failure is not None:
            return float("nan")
        return sum(reward for branch in self.branches for reward in branch.rewards)
