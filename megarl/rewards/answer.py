"""What a reward function sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One response to one prompt.

    Args:
        prompt_id: of the prompt.
        prompt, response: as text, without special tokens; empty where the run has no tokenizer.
        prompt_ids, response_ids: as token ids, those of the end token included.
        finished: True where the model ended the response itself, False where the length limit did.
        fields: the other columns of the prompt's row, a reference answer for example.
    """

    prompt_id: str
    prompt: str
    response: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    finished: bool
    fields: Mapping[str, Any]

    def field(self, name: str) -> Any:
        """A column of the prompt's row.

        Raises:
            ValueError: the row has no such column; the message lists those that it has.
        """
        if name not in self.fields:
            known = ", ".join(self.fields) or "none"
            raise ValueError(f"the prompt has no field {name!r}; it has: {known}")
        return self.fields[name]
