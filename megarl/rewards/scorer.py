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
from megarl.rewards.reward_worker import Failure, FunctionProcess, Reply
from megarl.types import Prompt, RolloutChunk

Decode = Callable[[Sequence[int]], str]
Scores = dict[str, npt.NDArray[np.float32]]
"""By function name, [N] float32 of the samples of a chunk; NaN is no score."""


@dataclass(frozen=True, kw_only=True)
class Unscored:
    """A response that a function did not score, after so many calls; the failure is the last one."""

    prompt_id: str
    failure: Failure
    calls: int


Failures = Mapping[tuple[str, str], Unscored]
"""The first failure of each kind, by function name and kind."""


class RuleScorer:
    """Scores samples with several reward functions, unweighted, in a child process; always ends in time.

    Args:
        decode: None leaves the texts of completions empty.
        time_limit: seconds of a call.
        retries: further calls after one that failed.
    """

    def __init__(
        self, functions: Sequence[RewardFunction], decode: Decode | None, *, time_limit: float, retries: int
    ) -> None:
        self._process = FunctionProcess(functions)
        self._decode: Decode = decode or (lambda _: "")
        self._time_limit, self._retries = time_limit, retries

    def start(self) -> None:
        """Starts the child process and loads the functions; a RunError if that fails."""
        self._process.start()

    def score(
        self, functions: Mapping[str, int], chunk: RolloutChunk, prompts: Sequence[Prompt], deadline: float
    ) -> tuple[Scores, Failures]:
        """Returns every function's score of every sample, and the first failure of each kind.

        Args:
            functions: index of each function to call, by name.
            prompts: of each sample.
            deadline: on `time.monotonic`; samples that are not scored by then have no score.
        """
        assert len(prompts) == len(chunk.sample_ids), f"{len(prompts)} prompts for {len(chunk.sample_ids)} samples"
        scores = {name: np.full(len(prompts), math.nan, np.float32) for name in functions}
        unscored: dict[tuple[str, str], Unscored] = {}
        for row, prompt in enumerate(prompts):
            completion = self._completion(chunk, row, prompt)
            for name, function in functions.items():
                reply, calls = self._call(function, completion, deadline)
                if isinstance(reply, Failure):
                    failed = Unscored(prompt_id=prompt.prompt_id, failure=reply, calls=calls)
                    unscored.setdefault((name, reply.kind), failed)
                else:
                    scores[name][row] = reply
        return scores, unscored

    def close(self) -> None:
        self._process.close()

    def _call(self, function: int, completion: Completion, deadline: float) -> tuple[Reply, int]:
        """Calls a function until it returns a score or its retries or the time are used up; counts the calls."""
        reply: Reply = Failure(kind="deadline", reason="no time was left of cluster.time_limits.scoring")
        calls = 0
        while isinstance(reply, Failure) and calls <= self._retries and time.monotonic() < deadline:
            calls += 1
            reply = self._process.call(function, completion, self._time_limit, deadline)
        return reply, calls

    def _completion(self, chunk: RolloutChunk, row: int, prompt: Prompt) -> Completion:
        response_ids = tuple(chunk.response_ids[row].tolist())
        return Completion(
            prompt_id=prompt.prompt_id,
            prompt=self._decode(prompt.token_ids),
            response=self._decode(response_ids),
            prompt_ids=prompt.token_ids,
            response_ids=response_ids,
            finished=bool(chunk.finished[row]),
            fields=prompt.fields,
        )
