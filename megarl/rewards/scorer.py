"""Scores chunks of rollouts with reward functions; a failed call leaves its sample without a score."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megarl.config.schema import RewardFunction
from megarl.rewards.functions import Completion
from megarl.rewards.reward_worker import CallError, Failure, FunctionProcess
from megarl.types import Prompt, RolloutChunk

Decode = Callable[[Sequence[int]], str]
Scores = dict[str, npt.NDArray[np.float32]]
"""By function name, [N] float32 of the samples of a chunk; NaN is no score."""


@dataclass(frozen=True, kw_only=True)
class Unscored:
    """A response that a function did not score.

    Args:
        failure: of the last call.
        calls: including retries.
    """

    prompt_id: str
    failure: Failure
    calls: int


Failures = Mapping[tuple[str, str], Unscored]
"""The first failure of each kind, by function name and kind."""


class RuleScorer:
    """Scores samples with several reward functions, unweighted, in a child process. Scoring always ends in time.

    Args:
        decode: text of token ids; None leaves the texts empty.
        time_limit: seconds of a call.
        retries: further calls after one that failed.
    """

    def __init__(
        self, functions: Sequence[RewardFunction], decode: Decode | None, *, time_limit: float, retries: int
    ) -> None:
        self._process = FunctionProcess(functions)
        self._decode = decode
        self._time_limit, self._retries = time_limit, retries

    def start(self) -> None:
        """Starts the child process and loads the functions.

        Raises:
            RunError: a function cannot be loaded.
        """
        self._process.start()

    def score(
        self, functions: Mapping[str, int], chunk: RolloutChunk, prompts: Sequence[Prompt], deadline: float
    ) -> tuple[Scores, Failures]:
        """Returns every function's score of every sample, and the first failure of each kind.

        Args:
            functions: index of each function to call, by name.
            chunk: N samples.
            prompts: [N], of each sample.
            deadline: on `time.monotonic`; samples that are not scored by then have no score.
        """
        assert len(prompts) == len(chunk.sample_ids), f"{len(prompts)} prompts for {len(chunk.sample_ids)} samples"
        scores = {name: np.full(len(prompts), math.nan, np.float32) for name in functions}
        unscored: dict[tuple[str, str], Unscored] = {}
        for row, prompt in enumerate(prompts):
            completion = self._completion(chunk, row, prompt)
            for name, number in functions.items():
                scored = self._call(number, completion, deadline)
                if isinstance(scored, Unscored):
                    unscored.setdefault((name, scored.failure.kind), scored)
                else:
                    scores[name][row] = scored
        return scores, unscored

    def close(self) -> None:
        self._process.close()

    def _call(self, function: int, completion: Completion, deadline: float) -> float | Unscored:
        """Calls a function until it returns a score or its retries or the time are used up."""
        failure, calls = Failure(kind="deadline", reason="no time was left of cluster.time_limits.scoring"), 0
        while calls <= self._retries and time.monotonic() < deadline:
            calls += 1
            try:
                return self._process.call(function, completion, self._time_limit, deadline)
            except CallError as error:
                failure = error.failure
        return Unscored(prompt_id=completion.prompt_id, failure=failure, calls=calls)

    def _completion(self, chunk: RolloutChunk, row: int, prompt: Prompt) -> Completion:
        response_ids = tuple(chunk.response_ids[row].tolist())
        return Completion(
            prompt_id=prompt.prompt_id,
            prompt="" if self._decode is None else self._decode(prompt.token_ids),
            response="" if self._decode is None else self._decode(response_ids),
            prompt_ids=prompt.token_ids,
            response_ids=response_ids,
            finished=bool(chunk.finished[row]),
            fields=prompt.fields,
        )
