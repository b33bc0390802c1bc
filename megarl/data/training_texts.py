"""Texts to train on: demonstrations, preferences and candidates."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from megarl.config.schema import Fault, SourceFields
from megarl.data.encoding import PROMPTS, Encoder, Ids, first_column, messages
from megarl.data.sources import Row, Rows, UnusableRowError, parse_rows
from megarl.data.tokenizer import Message

_RESPONSES = ("response_ids", "response", "completion")


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingText:
    """A tokenized prompt with the response to learn, or with several, the best or chosen one first.

    Args:
        key: key, unique in its data set and the same in every run.
        responses: token ids of the responses, end tokens included.
        margin: margin by which the first is better; None where the data has no margins.
        desirable: whether the only response is desirable; None where the data does not say.
    """

    key: str
    prompt_ids: Ids
    responses: tuple[Ids, ...]
    margin: float | None = None
    desirable: bool | None = None

    @property
    def content(self) -> bytes:
        parts = [self.prompt_ids.tobytes(), *(ids.tobytes() for ids in self.responses)]
        if len(self.responses) > 1:
            parts.insert(0, b"" if self.margin is None else np.float32(self.margin).tobytes())
        if self.desirable is not None:
            parts.insert(0, bytes([self.desirable]))
        return b"|".join(parts)


def load_demonstrations(source: SourceFields, encoder: Encoder, *, drop: Collection[Fault] = ()) -> Rows[TrainingText]:
    """Reads demonstrations (columns: docs/data.md), keyed by row number; see `parse_rows`."""

    def read(key: str, columns: dict[str, Any]) -> TrainingText:
        if "messages" in columns and not any(name in columns for name in _RESPONSES):
            chat = messages("messages", columns["messages"])
            if len(chat) < 2 or chat[-1]["role"] != "assistant":
                raise ValueError("messages must be a prompt and, as its last message, the assistant's response")
            prompt = encoder.chat(chat[:-1], columns.get("tools"))
            response = encoder.answer_message(chat[-1])
        else:
            prompt = encoder.prompt(columns, *PROMPTS)
            response = encoder.response(columns, *_RESPONSES)
        return TrainingText(key=key, prompt_ids=prompt, responses=(response,))

    return _load(source, encoder, read, drop)


def load_pairs(
    source: SourceFields, encoder: Encoder, *, margins: bool = False, drop: Collection[Fault] = ()
) -> Rows[TrainingText]:
    """Reads pairs (columns: docs/data.md), keyed by row number; see `parse_rows`.

    Args:
        margins: whether every row must have the column `margin`, a number.
    """

    def read(key: str, columns: dict[str, Any]) -> TrainingText:
        margin = _margin(columns) if margins else None
        if _is_chat(columns.get("chosen")) or _is_chat(columns.get("rejected")):
            prompt, chosen, rejected = _whole_chats(encoder, columns)
        else:
            prompt = encoder.prompt(columns, *PROMPTS)
            chosen = encoder.response(columns, "chosen_ids", "chosen")
            rejected = encoder.response(columns, "rejected_ids", "rejected")
        return TrainingText(key=key, prompt_ids=prompt, responses=(chosen, rejected), margin=margin)

    return _load(source, encoder, read, drop)


def load_rated(source: SourceFields, encoder: Encoder, *, drop: Collection[Fault] = ()) -> Rows[TrainingText]:
    """Reads single responses (columns: docs/data.md), keyed by row number; see `parse_rows`.

    The column `label` is true, or 1, for a desirable response.
    """

    def read(key: str, columns: dict[str, Any]) -> TrainingText:
        label = columns.get("label")
        if not isinstance(label, bool | int) or label not in (0, 1):
            rule = "it must be true (1) for a desirable response, or false (0)"
            hint = "rows with chosen and rejected are for other losses"
            raise ValueError(f"label is {label!r}: {rule}; {hint}")
        prompt = encoder.prompt(columns, *PROMPTS)
        response = encoder.response(columns, *_RESPONSES)
        return TrainingText(key=key, prompt_ids=prompt, responses=(response,), desirable=bool(label))

    return _load(source, encoder, read, drop)


def load_candidates(source: SourceFields, encoder: Encoder, *, drop: Collection[Fault] = ()) -> Rows[TrainingText]:
    """Reads prompts with candidates, equally many in all rows; see `load_pairs`.

    The column `best` is the index of the best candidate, which becomes the first response; the
    others keep their order.
    """
    sizes: list[int] = []

    def read(key: str, columns: dict[str, Any]) -> TrainingText:
        prompt = encoder.prompt(columns, *PROMPTS)
        name = first_column(columns, "candidates_ids", "candidates")
        given = columns[name]
        if not isinstance(given, list) or len(cast(list[Any], given)) < 2:
            raise ValueError(f"{name} must be a list of two responses or more")
        candidates = [encoder.response({name: candidate}, name) for candidate in cast(list[Any], given)]
        count = len(candidates)
        best = columns.get("best")
        if type(best) is not int or not 0 <= best < count:
            raise ValueError(f"best is {best!r}: it must be the index of a candidate, from 0 to {count - 1}")
        sizes.append(count)
        if count != sizes[0]:
            raise ValueError(f"it has {count} candidates: all rows must have as many, and others have {sizes[0]}")
        return TrainingText(key=key, prompt_ids=prompt, responses=(candidates.pop(best), *candidates))

    return _load(source, encoder, read, drop)


def _load(
    source: SourceFields,
    encoder: Encoder,
    read: Callable[[str, dict[str, Any]], TrainingText],
    drop: Collection[Fault],
) -> Rows[TrainingText]:
    def parse(row: Row, columns: dict[str, Any]) -> TrainingText:
        text = read(str(row.number), columns)
        for other in text.responses[1:]:
            if np.array_equal(text.responses[0], other):
                raise UnusableRowError("equal", "the better response is the same as another: one must be better")
        encoder.check_length(text.prompt_ids, max(text.responses, key=len))
        return text

    return parse_rows(source, parse, drop)


def _margin(columns: dict[str, Any]) -> float:
    margin = columns.get("margin")
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not np.isfinite(margin):
        raise ValueError(f"margin is {margin!r}: it must be a number, by how much the chosen response is better")
    return float(margin)


def _is_chat(response: object) -> bool:
    """Whether a response is a whole chat, not only its last message."""
    return isinstance(response, list) and len(cast(list[Any], response)) > 1


def _whole_chats(encoder: Encoder, columns: dict[str, Any]) -> tuple[Ids, Ids, Ids]:
    """Reads prompt, chosen and rejected from two chats that differ in their last message."""
    chosen = messages("chosen", columns.get("chosen"))
    rejected = messages("rejected", columns.get("rejected"))
    chat = chosen[:-1]
    if chat != rejected[:-1]:
        raise ValueError("chosen and rejected are chats that differ before their last message")
    if not chosen[-1]["role"] == rejected[-1]["role"] == "assistant":
        raise ValueError("chosen and rejected are chats: their last message must be the assistant's")
    if not _begins_with(chat, columns.get("prompt")):
        raise ValueError("chosen and rejected are chats, and the prompt is not what they begin with")
    prompt = encoder.chat(chat, columns.get("tools"))
    return prompt, encoder.answer_message(chosen[-1]), encoder.answer_message(rejected[-1])


def _begins_with(chat: list[Message], prompt: object) -> bool:
    """Whether a prompt, if given, is the chat or the text of one of its user messages."""
    if isinstance(prompt, str):
        return any(message["role"] == "user" and message["content"] == prompt for message in chat)
    return prompt is None or messages("prompt", prompt) == chat
