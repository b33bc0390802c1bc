"""What tokenizers have really encoded."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.data.tokenizer import Tokenizer


def encoded_lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list to which every tokenizer adds the characters of each text it encodes or renders from now on."""
    lengths: list[int] = []
    encode = Tokenizer._encode
    render = Tokenizer.written

    def encoded(self: Tokenizer, text: str, *, special: bool) -> list[int]:
        ids = encode(self, text, special=special)
        lengths.append(len(text))
        return ids

    def rendered(self: Tokenizer, *args: Any, **options: Any) -> str:
        text = render(self, *args, **options)
        lengths.append(len(text))
        return text

    monkeypatch.setattr(Tokenizer, "_encode", encoded)
    monkeypatch.setattr(Tokenizer, "written", rendered)
    return lengths
