"""Demonstrations: prompts with the response to learn."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megarl.config.schema import Fault, SourceFields
from megarl.data.encoding import PROMPTS, Encoder, messages
from megarl.data.sources import Row, Rows, parse_rows

_RESPONSES = ("response_ids", "response", "completion")


@dataclass(frozen=True, kw_only=True, eq=False)
class Demonstration:
    """A tokenized prompt and response.

    Args:
        key: unique in its data set, the same in every run.
        prompt_ids: [P] int32.
        response_ids: [R] int32, end token included.
    """

    key: str
    prompt_ids: npt.NDArray[np.int32]
    response_ids: npt.NDArray[np.int32]

    @property
    def content(self) -> bytes:
        """Returns the tokens, with the boundary of the response marked."""
        return b"|".join(ids.tobytes() for ids in (self.prompt_ids, self.response_ids))


def load_demonstrations(source: SourceFields, encoder: Encoder, *, drop: Collection[Fault] = ()) -> Rows[Demonstration]:
    """Reads demonstrations; see docs/data.md for the columns. A row's key is its number.

    Args:
        drop: faults of rows that are dropped; rows with other faults are errors.

    Raises:
        OSError, ValueError: the source cannot be read, or rows are broken; the first ones are named.
    """

    def parse(row: Row, columns: dict[str, Any]) -> Demonstration:
        if "messages" in columns and not any(name in columns for name in _RESPONSES):
            chat = messages("messages", columns["messages"])
            if len(chat) < 2 or chat[-1]["role"] != "assistant":
                raise ValueError("messages must be a prompt and, as its last message, the assistant's response")
            prompt, response = encoder.chat(chat[:-1]), encoder.answer(chat[-1]["content"])
        else:
            prompt, response = encoder.prompt(columns, *PROMPTS), encoder.response(columns, *_RESPONSES)
        encoder.check_length(prompt, response)
        return Demonstration(key=str(row.number), prompt_ids=prompt, response_ids=response)

    return parse_rows(source, parse, drop)
