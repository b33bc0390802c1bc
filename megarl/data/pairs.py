"""Preference pairs: two responses to a prompt, of which one is better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megarl.config.schema import SourceFields
from megarl.data.encoding import PROMPTS, Encoder, Ids, messages
from megarl.data.sources import Row, parse_rows
from megarl.data.tokenizer import Message, Tokenizer


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """One prompt and two responses to it, tokenised.

    Args:
        key: unique in its data set, the same in every run.
        prompt_ids: P ids, int32.
        chosen_ids, rejected_ids: ids of the better and of the worse response, int32, the end token included.
    """

    key: str
    prompt_ids: npt.NDArray[np.int32]
    chosen_ids: npt.NDArray[np.int32]
    rejected_ids: npt.NDArray[np.int32]

    @property
    def content(self) -> bytes:
        """Its tokens, and where the responses begin."""
        return b"|".join(ids.tobytes() for ids in (self.prompt_ids, self.chosen_ids, self.rejected_ids))


def load_pairs(
    source: SourceFields,
    tokenizer: Tokenizer | None,
    *,
    vocab_size: int,
    chat_template: bool,
    max_tokens: int,
    too_long: Literal["refuse", "drop"],
) -> tuple[list[Pair], int]:
    """Reads preference pairs; a row's key is its number.

    A row has a prompt (``prompt``, text or a chat; or ``prompt_ids``) and two responses, ``chosen`` and ``rejected``:
    text, one message, or ids (``chosen_ids``, ``rejected_ids``). Or ``chosen`` and ``rejected`` are whole chats that
    differ in their last message.

    Args:
        source: of the rows.
        tokenizer: None where all rows have ids.
        vocab_size: ids must lie below it.
        chat_template: text prompts are what a user says in a chat.
        max_tokens: of the prompt and the longer response together.
        too_long: whether rows that have more are an error, or left out.

    Returns:
        The pairs, and how many rows were left out.

    Raises:
        OSError, ValueError: the source cannot be read; rows are broken, of which the first are named with file, line
            and reason; the tokenizer does not fit.
    """
    encoder = Encoder(
        tokenizer, vocab_size=vocab_size, chat_template=chat_template, max_tokens=max_tokens, too_long=too_long
    )

    def parse(row: Row, columns: dict[str, Any]) -> Pair | None:
        prompt, chosen, rejected = _whole_chats(encoder, columns) if _are_chats(columns) else _apart(encoder, columns)
        if np.array_equal(chosen, rejected):
            raise ValueError("chosen and rejected are the same response: one must be better")
        if not encoder.fits(prompt, max(chosen, rejected, key=len)):
            return None
        return Pair(key=str(row.number), prompt_ids=prompt, chosen_ids=chosen, rejected_ids=rejected)

    return parse_rows(source, parse)


def _are_chats(columns: dict[str, Any]) -> bool:
    return any(isinstance(columns.get(name), list) and len(columns[name]) > 1 for name in ("chosen", "rejected"))


def _apart(encoder: Encoder, columns: dict[str, Any]) -> tuple[Ids, Ids, Ids]:
    """Prompt, chosen and rejected of a row with a column for each."""
    prompt = encoder.prompt(columns, *PROMPTS)
    return (
        prompt,
        encoder.response(columns, "chosen_ids", "chosen"),
        encoder.response(columns, "rejected_ids", "rejected"),
    )


def _whole_chats(encoder: Encoder, columns: dict[str, Any]) -> tuple[Ids, Ids, Ids]:
    """Prompt, chosen and rejected of a row with two chats that share all but their last message."""
    chosen, rejected = (messages(name, columns.get(name)) for name in ("chosen", "rejected"))
    if chosen[:-1] != rejected[:-1]:
        raise ValueError("chosen and rejected are chats that differ before their last message")
    if not chosen[-1]["role"] == rejected[-1]["role"] == "assistant":
        raise ValueError("chosen and rejected are chats: their last message must be the assistant's")
    if not _agrees(columns.get("prompt"), chosen[:-1]):
        raise ValueError("chosen and rejected are chats, and the prompt is not what they begin with")
    return encoder.chat(chosen[:-1]), encoder.answer(chosen[-1]["content"]), encoder.answer(rejected[-1]["content"])


def _agrees(prompt: object, chat: list[Message]) -> bool:
    """Whether a prompt beside whole chats is theirs: absent, the messages before the response, or a user's message."""
    if prompt is None:
        return True
    if isinstance(prompt, str):
        return any(message["role"] == "user" and message["content"] == prompt for message in chat)
    return messages("prompt", prompt) == chat
