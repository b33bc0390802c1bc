"""Some samples of a run for people to read: samples.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from megarl.cluster.engines import Rollouts
from megarl.data.tokenizer import Tokenizer
from megarl.run.sinks import JsonLines


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


def shown_samples(
    rollouts: Rollouts,
    scores: npt.NDArray[np.float32],
    sources: Mapping[str, npt.NDArray[np.float32]],
    tokenizer: Tokenizer | None,
    count: int,
) -> list[ShownSample]:
    """The first samples; only their chunks are fetched.

    Args:
        scores: [N] of the samples.
        sources: [N] by source.
        tokenizer: without one the tokens stay numbers.
        count: of samples, at most.
    """

    def text(ids: npt.NDArray[np.int32]) -> str | tuple[int, ...]:
        return tuple(ids.tolist()) if tokenizer is None else tokenizer.decode(ids.tolist())

    shown: list[ShownSample] = []
    for index, sample in enumerate(rollouts.samples[:count]):
        chunk = rollouts.chunks[sample.chunk]
        shown.append(
            ShownSample(
                sample_id=sample.sample_id,
                prompt_id=sample.prompt_id,
                prompt=text(chunk.prompt_ids[sample.row]),
                response=text(chunk.response_ids[sample.row]),
                finished=sample.finished,
                score=float(scores[index]),
                scores={name: float(values[index]) for name, values in sources.items()},
            )
        )
    return shown
