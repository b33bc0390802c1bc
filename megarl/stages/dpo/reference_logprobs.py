"""Log-probabilities of responses under the reference, computed once and kept in files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megarl.data.encoding import Ids
from megarl.data.training_texts import TrainingText
from megarl.files import write_durably
from megarl.types import FloatArray, TextChunk


class ReferenceLogprobs:
    """Log-probabilities of whole responses under one model, found by the token ids of a row.

    Args:
        directory: folder of the files, of which an interrupted pass keeps those that are whole.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._logprobs: dict[str, float] = {}
        self._files = 0
        for file in sorted(directory.glob("*.json")):
            self._logprobs |= json.loads(file.read_text(encoding="utf-8"))
            self._files += 1

    def missing(self, texts: Iterable[TrainingText]) -> list[TrainingText]:
        """Returns those of the texts that have a response without a log-probability."""
        missing: list[TrainingText] = []
        for text in texts:
            keys = [_key(text.prompt_ids, response) for response in text.responses]
            if any(key not in self._logprobs for key in keys):
                missing.append(text)
        return missing

    def add(self, chunks: Sequence[TextChunk], logprobs: Sequence[npt.NDArray[np.float64]]) -> None:
        """Keeps log-probabilities, [N] for each chunk of N rows, in a file more."""
        added: dict[str, float] = {}
        for chunk, column in zip(chunks, logprobs, strict=True):
            for key, logprob in zip(_keys(chunk), column.astype(np.float32), strict=True):
                added[key] = float(logprob)
        write_durably(self._directory / f"{self._files:06d}.json", json.dumps(added, indent=0))
        self._files += 1
        self._logprobs |= added

    def column(self, chunk: TextChunk) -> FloatArray:
        """Returns the log-probabilities of a chunk's rows, [N]."""
        return np.array([self._logprobs[key] for key in _keys(chunk)], dtype=np.float32)


def _keys(chunk: TextChunk) -> list[str]:
    keys: list[str] = []
    for prompt, response in zip(chunk.prompt_ids, chunk.response_ids, strict=True):
        keys.append(_key(prompt, response))
    return keys


def _key(prompt_ids: Ids, response_ids: Ids) -> str:
    digest = hashlib.blake2b(len(prompt_ids).to_bytes(8, "little"), digest_size=16)
    digest.update(prompt_ids.astype("<i4").tobytes())
    digest.update(response_ids.astype("<i4").tobytes())
    return digest.hexdigest()
