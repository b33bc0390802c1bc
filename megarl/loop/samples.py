"""Samples for people to read: texts, scores and lengths of a few rollouts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from megarl.cluster.rollouts import Rollouts
from megarl.data.tokenizer import Tokenizer
from megarl.obs.samples import ShownSample


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
