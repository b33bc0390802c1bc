"""Preferences: a prompt and responses to it, one of which is the best."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from megarl.config.schema import Fault, SourceFields
from megarl.data.encoding import PROMPTS, Encoder, Ids, first_of, messages
from megarl.data.sources import Row, Rows, UnusableRowError, parse_rows
from megarl.data.tokenizer import Message


@dataclass(frozen=True, kw_only=True, eq=False)
class Preference:
    """A tokenized prompt and its responses, the best first; of a pair, the chosen one and then the rejected one.

    Args:
        key: unique in its data set, the same in every run.
        prompt_ids: [P] int32.
        responses: int32 each, end token included.
        margin: by how much the first is better; None where the data has no margins.
    """

    key: str
    prompt_ids: npt.NDArray[np.int32]
    responses: tuple[npt.NDArray[np.int32], ...]
    margin: float | None = None

    @property
    def content(self) -> bytes:
        """Returns margin and tokens, with the boundaries of the responses marked."""
        told = b"" if self.margin is None else np.float32(self.margin).tobytes()
        return b"|".join([told, *(ids.tobytes() for ids in (self.prompt_ids, *self.responses))])


_Read = tuple[Ids, tuple[Ids, ...], float | None]
"""Prompt, responses with the best one first, and margin."""


def load_pairs(
    source: SourceFields, encoder: Encoder, *, margins: bool = False, drop: Collection[Fault] = ()
) -> Rows[Preference]:
    """Reads preference pairs; see docs/data.md for the columns. A row's key is its number.

    Args:
        margins: every row has the column ``margin``, a number.
        drop: faults of rows that are dropped; rows with other faults are errors.

    Raises:
        OSError, ValueError: the source cannot be read, or rows are broken; the first ones are named.
    """

    def read(columns: dict[str, Any]) -> _Read:
        chats = any(isinstance(columns.get(name), list) and len(columns[name]) > 1 for name in ("chosen", "rejected"))
        prompt, chosen, rejected = (_whole_chats if chats else _apart)(encoder, columns)
        return prompt, (chosen, rejected), _margin(columns) if margins else None

    return _load(source, encoder, read, drop)


def load_candidates(source: SourceFields, encoder: Encoder, *, drop: Collection[Fault] = ()) -> Rows[Preference]:
    """Reads prompts with candidates, of which ``best`` is the index of the best; all rows have equally many.

    Args and Raises: as of ``load_pairs``. ``responses`` are the best candidate, then the others in order.
    """
    sizes: list[int] = []

    def read(columns: dict[str, Any]) -> _Read:
        prompt, candidates = encoder.prompt(columns, *PROMPTS), _candidates(encoder, columns)
        best = columns.get("best")
        if type(best) is not int or not 0 <= best < len(candidates):
            raise ValueError(f"best is {best!r}: it must be the index of a candidate, from 0 to {len(candidates) - 1}")
        sizes.append(len(candidates))
        if len(candidates) != sizes[0]:
            raise ValueError(f"it has {len(candidates)} candidates: all rows must have as many, and others {sizes[0]}")
        return prompt, (candidates[best], *candidates[:best], *candidates[best + 1 :]), None

    return _load(source, encoder, read, drop)


def _load(
    source: SourceFields, encoder: Encoder, read: Callable[[dict[str, Any]], _Read], drop: Collection[Fault]
) -> Rows[Preference]:
    def parse(row: Row, columns: dict[str, Any]) -> Preference:
        prompt, responses, margin = read(columns)
        best, *others = responses
        if any(np.array_equal(best, other) for other in others):
            raise UnusableRowError("equal", "the better response is the same as another: one must be better")
        encoder.check_length(prompt, max(responses, key=len))
        return Preference(key=str(row.number), prompt_ids=prompt, responses=responses, margin=margin)

    return parse_rows(source, parse, drop)


def _candidates(encoder: Encoder, columns: dict[str, Any]) -> tuple[Ids, ...]:
    name = first_of(columns, "candidates_ids", "candidates")
    value = columns[name]
    if not isinstance(value, list) or len(cast(list[Any], value)) < 2:
        raise ValueError(f"{name} must be a list of two responses or more")
    return tuple(encoder.response({name: candidate}, name) for candidate in cast(list[Any], value))


def _margin(columns: dict[str, Any]) -> float:
    margin = columns.get("margin")
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not np.isfinite(margin):
        raise ValueError(f"margin is {margin!r}: it must be a number, by how much the chosen response is better")
    return float(margin)


def _apart(encoder: Encoder, columns: dict[str, Any]) -> tuple[Ids, Ids, Ids]:
    """Reads prompt, chosen and rejected from a column each."""
    prompt = encoder.prompt(columns, *PROMPTS)
    return (
        prompt,
        encoder.response(columns, "chosen_ids", "chosen"),
        encoder.response(columns, "rejected_ids", "rejected"),
    )


def _whole_chats(encoder: Encoder, columns: dict[str, Any]) -> tuple[Ids, Ids, Ids]:
    """Reads prompt, chosen and rejected from two chats that differ in their last message."""
    chosen, rejected = (messages(name, columns.get(name)) for name in ("chosen", "rejected"))
    if chosen[:-1] != rejected[:-1]:
        raise ValueError("chosen and rejected are chats that differ before their last message")
    if not chosen[-1]["role"] == rejected[-1]["role"] == "assistant":
        raise ValueError("chosen and rejected are chats: their last message must be the assistant's")
    if not _agrees(columns.get("prompt"), chosen[:-1]):
        raise ValueError("chosen and rejected are chats, and the prompt is not what they begin with")
    return encoder.chat(chosen[:-1]), encoder.answer(chosen[-1]["content"]), encoder.answer(rejected[-1]["content"])


def _agrees(prompt: object, chat: list[Message]) -> bool:
    """Whether a prompt column matches whole chats: absent, equal to their common messages, or one user message."""
    if prompt is None:
        return True
    if isinstance(prompt, str):
        return any(message["role"] == "user" and message["content"] == prompt for message in chat)
    return messages("prompt", prompt) == chat
