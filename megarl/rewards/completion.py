"""The input of reward functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.data.tokenizer import Message


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One response to one prompt.

    Args:
        prompt, response: text without special tokens; empty if the run has no tokenizer. The
            response of a conversation is its last turn.
        response_ids: ids with the end token; in a conversation all that follows its first prompt,
            given ids too.
        loss_mask: whether each response id was sampled; None where all were.
        finished: False if the response was cut off at the length limit.
        messages: messages of a prompt that is a chat, as in its row; None for others.
        fields: other columns of the prompt's row, such as a reference answer.
    """

    prompt_id: str
    prompt: str
    response: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    finished: bool
    fields: Mapping[str, Any]
    messages: Sequence[Message] | None = None
    loss_mask: tuple[bool, ...] | None = None

    @property
    def response_tokens(self) -> int:
        """Returns the number of sampled tokens."""
        if self.loss_mask is None:
            return len(self.response_ids)
        return sum(self.loss_mask)

    def field(self, name: str) -> Any:
        """Returns a column of the prompt's row; a ValueError lists the columns if there is no such one."""
        if name not in self.fields:
            known = ", ".join(self.fields) or "none"
            raise ValueError(f"the prompt has no field {name!r}; it has: {known}")
        return self.fields[name]
