"""Scores chunks of rollouts with reward functions. A plain class, which knows nothing of processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from megarl.config.schema import RewardFunction
from megarl.rewards.answer import Answer
from megarl.rewards.registry import bind, labels
from megarl.types import Prompt, RolloutChunk

Decode = Callable[[Sequence[int]], str]
_LARGEST = float(np.finfo(np.float32).max)


class RewardError(RuntimeError):
    """A reward function failed, or returned no finite number; the message names it and the prompt."""


class RuleScorer:
    """Some reward functions, each by itself: their weights are for those who add them up.

    Args:
        functions: of the configuration, checked by ``check_functions``.
        decode: text of token ids; None leaves the texts of the answers empty.

    Raises:
        ValueError: a function cannot be found.
    """

    def __init__(self, functions: Sequence[RewardFunction], decode: Decode | None) -> None:
        self._functions = dict(zip(labels(functions), map(bind, functions), strict=True))
        self._decode = decode

    def score(self, chunk: RolloutChunk, prompts: Sequence[Prompt]) -> dict[str, npt.NDArray[np.float32]]:
        """Every function's score of every sample.

        Args:
            chunk: N samples.
            prompts: N, the prompt of each.

        Returns:
            By label (see ``registry.labels``), [N] float32.

        Raises:
            RewardError: a function failed, or returned no finite number.
        """
        assert len(prompts) == len(chunk.sample_ids), f"{len(prompts)} prompts for {len(chunk.sample_ids)} samples"
        answers = [self._answer(chunk, row, prompt) for row, prompt in enumerate(prompts)]
        return {
            label: np.array([_applied(label, function, answer) for answer in answers], dtype=np.float32)
            for label, function in self._functions.items()
        }

    def _answer(self, chunk: RolloutChunk, row: int, prompt: Prompt) -> Answer:
        response_ids = tuple(chunk.response_ids[row].tolist())
        return Answer(
            prompt_id=prompt.prompt_id,
            prompt="" if self._decode is None else self._decode(prompt.token_ids),
            response="" if self._decode is None else self._decode(response_ids),
            prompt_ids=prompt.token_ids,
            response_ids=response_ids,
            finished=bool(chunk.finished[row]),
            fields=prompt.fields,
        )


def _applied(label: str, function: Callable[[Answer], Any], answer: Answer) -> float:
    try:
        value = function(answer)
    except Exception as error:  # the user's own code
        raise RewardError(
            f"reward function {label!r} failed on prompt {answer.prompt_id!r}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(value, Real | np.bool_) or not abs(float(value)) <= _LARGEST:
        raise RewardError(
            f"reward function {label!r} returned {value!r} on prompt {answer.prompt_id!r}: "
            f"it must return a finite number"
        )
    return float(value)
