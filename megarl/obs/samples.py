"""Some samples of a run for people to read: samples.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from megarl.obs.metrics import JsonLines


@dataclass(frozen=True, kw_only=True)
class ShownSample:
    """A prompt, a response to it, and what it was worth.

    Args:
        sample_id, prompt_id: of the sample.
        prompt, response: as text; their token ids where the run has no tokenizer.
        finished: True where the model ended the response itself, False where the length limit did.
        score: that training saw; of an evaluation the reward model's, or without one the first rule's.
        scores: that each source gave, unweighted, by its name: the reward model's and each function's.
    """

    sample_id: str
    prompt_id: str
    prompt: str | tuple[int, ...]
    response: str | tuple[int, ...]
    finished: bool
    score: float
    scores: Mapping[str, float]


class SampleWriter:
    """Appends one JSON object per sample to a file.

    Args:
        path: of the file.
    """

    def __init__(self, path: str | Path) -> None:
        self._lines = JsonLines(path)

    def write(self, step: int, kind: Literal["train", "evaluation"], samples: Iterable[ShownSample]) -> None:
        """Appends the samples of a step, or of the evaluation after it."""
        for sample in samples:
            self._lines.write({"step": step, "kind": kind, **asdict(sample)})

    def close(self) -> None:
        """Closes the file."""
        self._lines.close()
