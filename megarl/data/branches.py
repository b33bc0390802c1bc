"""Which samples of a step belong to the same conversation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megarl.types import Int64Array, SampleInfo

Indices = Int64Array


def numbered(names: Iterable[str]) -> Indices:
    """Returns a number of each name, from 0 on in the order of first appearance."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Branches:
    """Which samples belong together; without branches, each sample is a conversation of its own.

    Args:
        conversation: number of each sample's conversation, in their order, [N].
        last: index of the last sample of each conversation, [C].
    """

    conversation: Indices
    last: Indices

    @classmethod
    def of(cls, samples: Sequence[SampleInfo]) -> Branches:
        conversation = numbered(sample.conversation for sample in samples)
        last = {number: index for index, number in enumerate(conversation.tolist())}
        return cls(conversation=conversation, last=np.array(list(last.values()), np.int64))

    def rows(self, conversation: int) -> list[int]:
        """Returns the samples of a conversation."""
        return np.flatnonzero(self.conversation == conversation).tolist()

    def whole(self, samples: Sequence[SampleInfo]) -> list[SampleInfo]:
        """Returns each conversation as one sample: the last, with the first prompt and all tokens."""
        prompts = dict[int, int]()
        tokens = [0] * len(self.last)
        for number, sample in zip(self.conversation.tolist(), samples, strict=True):
            prompts.setdefault(number, sample.prompt_tokens)
            tokens[number] += sample.response_tokens
        merged: list[SampleInfo] = []
        for number, row in enumerate(self.last.tolist()):
            sample = samples[row]
            merged.append(replace(sample, prompt_tokens=prompts[number], response_tokens=tokens[number]))
        return merged
