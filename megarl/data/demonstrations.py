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
from megarl.data.tokenizer import Tokenizer

_RESPONSES = ("response_ids", "response", "completion")


@dataclass(frozen=True, kw_only=True, eq=False)
class Demonstration:
    """One prompt and its response, tokenised.

    Args:
        key: unique in its data set, the same in every run.
        prompt_ids: P ids, int32.
        response_ids: R ids, int32, the end token included.
    """

    key: str
    prompt_ids: npt.NDArray[np.int32]
    response_ids: npt.NDArray[np.int32]

    @property
    def content(self) -> bytes:
        """Its tokens, and where the response begins."""
        return b"|".join(ids.tobytes() for ids in (self.prompt_ids, self.response_ids))


def load_demonstrations(
    source: SourceFields,
    tokenizer: Tokenizer | None,
    *,
    vocab_size: int,
    chat_template: bool,
    max_tokens: int,
    drop: Collection[Fault] = (),
) -> Rows[Demonstration]:
    """Reads demonstrations; a row's key is its number.

    A row has a prompt (``prompt``, text or a chat; or ``prompt_ids``) and a response (``response`` or ``completion``,
    text or one message; or ``response_ids``), or it has a chat (``messages``) whose last message is the response.

    Args:
        source: of the rows.
        tokenizer: None where all rows have ids.
        vocab_size: ids must lie below it.
        chat_template: text prompts are what a user says in a chat.
        max_tokens: of prompt and response together.
        drop: faults of rows that are left out; rows with others are errors.

    Raises:
        OSError, ValueError: the source cannot be read; rows are broken, of which the first are named with file, line
            and reason; the tokenizer does not fit.
    """
    encoder = Encoder(tokenizer, vocab_size=vocab_size, chat_template=chat_template, max_tokens=max_tokens)

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
