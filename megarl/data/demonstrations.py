"""Demonstrations: prompts with the response to learn."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from megarl.config.schema import Fault, SourceFields
from megarl.data.encoding import PROMPTS, Encoder, Ids, messages
from megarl.data.sources import Row, Rows, parse_rows

_RESPONSES = ("response_ids", "response", "completion")


@dataclass(frozen=True, kw_only=True, eq=False)
class Demonstration:
    """A tokenized prompt and response.

    Args:
        key: key, unique in its data set and the same in every run.
        response_ids: token ids of the response, end token included.
    """

    key: str
    prompt_ids: Ids
    response_ids: Ids

    margin: ClassVar[float | None] = None
    """A preference may have one."""

    @property
    def responses(self) -> tuple[Ids]:
        return (self.response_ids,)

    @property
    def content(self) -> bytes:
        return self.prompt_ids.tobytes() + b"|" + self.response_ids.tobytes()


def load_demonstrations(source: SourceFields, encoder: Encoder, *, drop: Collection[Fault] = ()) -> Rows[Demonstration]:
    """Reads demonstrations (columns: docs/data.md), keyed by row number; see `parse_rows`."""

    def parse(row: Row, columns: dict[str, Any]) -> Demonstration:
        if "messages" in columns and not any(name in columns for name in _RESPONSES):
            chat = messages("messages", columns["messages"])
            if len(chat) < 2 or chat[-1]["role"] != "assistant":
                raise ValueError("messages must be a prompt and, as its last message, the assistant's response")
            prompt = encoder.chat(chat[:-1], columns.get("tools"))
            response = encoder.answer_message(chat[-1])
        else:
            prompt = encoder.prompt(columns, *PROMPTS)
            response = encoder.response(columns, *_RESPONSES)
        encoder.check_length(prompt, response)
        return Demonstration(key=str(row.number), prompt_ids=prompt, response_ids=response)

    return parse_rows(source, parse, drop)
