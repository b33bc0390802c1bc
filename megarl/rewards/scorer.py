"""Scores responses with reward functions; a failed call leaves its responses without a score."""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.config.schema import Reward, RewardFunction
from megarl.rewards.adapters import Failure
from megarl.rewards.call_queue import FunctionCall, FunctionProcess
from megarl.rewards.completion import Completion
from megarl.types import FloatArray, Prompt, RolloutChunk

Decode = Callable[[Sequence[int]], str]
Scores = dict[str, FloatArray]
"""By function name, [n] float32; NaN is no score."""

_CACHED = 200_000
"""Scores that a process remembers; further ones replace the oldest."""


@dataclass(frozen=True, kw_only=True)
class Unscored:
    """A response that a function did not score, the number of calls, and the last failure."""

    prompt_id: str
    failure: Failure
    calls: int


Failures = Mapping[tuple[str, str], Unscored]
"""The first failure of each kind, by function name and kind."""


@dataclass(kw_only=True)
class _Unit(FunctionCall):
    """A call by a function's name; for each reply, its key in the cache and the rows of its score."""

    name: str
    rows: Sequence[tuple[bytes, Sequence[int]]]


class RuleScorer:
    """Scores completions with several reward functions, unweighted, in a child process; always ends in time.

    Args:
        decode: returns the text of ids; None leaves the texts of completions empty.
    """

    def __init__(
        self, functions: Sequence[RewardFunction], decode: Decode | None, reward: Reward, memory: int | None = None
    ) -> None:
        self._functions = tuple(functions)
        self._process = FunctionProcess(functions, reward.time_limit, reward.retries, memory)
        self._decode: Decode = decode or (lambda _: "")
        self._cache: dict[tuple[int, bytes], float] = {}

    def start(self, deadline: float = math.inf) -> None:
        """Starts the child process and loads the functions; a RunError if that fails, or not by the deadline."""
        self._process.start(deadline)

    def score(
        self, functions: Mapping[str, int], completions: Sequence[Completion], deadline: float
    ) -> tuple[Scores, Failures]:
        """Returns every function's score of every completion, and the first failure of each kind.

        Args:
            functions: index of each function to call, by name.
            deadline: end on `time.monotonic`; a completion that is not scored by then has no score.
        """
        scores = {name: np.full(len(completions), math.nan, np.float32) for name in functions}
        units: list[_Unit] = []
        for name, index in functions.items():
            units += self._units(name, index, completions, scores[name])
        units.sort(key=lambda unit: unit.rows[0][1][0])  # stable: each completion by the functions in their order
        self._process.make(units, deadline)
        unscored: dict[tuple[str, str], Unscored] = {}
        for unit in units:
            for completion, reply, (key, rows) in zip(unit.completions, unit.replies, unit.rows, strict=True):
                if isinstance(reply, Failure):
                    failed = Unscored(prompt_id=completion.prompt_id, failure=reply, calls=unit.tries)
                    unscored.setdefault((unit.name, reply.kind), failed)
                else:
                    scores[unit.name][rows] = reply
                    if self._functions[unit.function].cache:
                        self._cache[unit.function, key] = reply
        while len(self._cache) > _CACHED:
            del self._cache[next(iter(self._cache))]
        return scores, unscored

    def completions(self, chunk: RolloutChunk, prompts: Mapping[int, Prompt]) -> list[Completion]:
        """Returns the completions in some rows of a chunk; `prompts` are by row."""
        found: list[Completion] = []
        for row, prompt in prompts.items():
            prompt_ids = tuple(chunk.prompt_ids[row].tolist())  # an environment's are not those of the prompt
            completion = Completion(
                prompt_id=prompt.prompt_id,
                prompt=self._decode(prompt_ids),
                response=self._decode(_last_turn(chunk, row)),
                prompt_ids=prompt_ids,
                response_ids=tuple(chunk.response_ids[row].tolist()),
                finished=bool(chunk.finished[row]),
                fields=prompt.fields,
                messages=prompt.messages,
                loss_mask=None if chunk.loss_mask is None else tuple(chunk.loss_mask[row].tolist()),
            )
            found.append(completion)
        return found

    def close(self) -> None:
        self._process.close()

    def _units(self, name: str, index: int, completions: Sequence[Completion], scores: FloatArray) -> Iterable[_Unit]:
        """Yields the calls of a function; fills in the scores that are in the cache."""
        spec = self._functions[index]
        rows: dict[bytes, list[int]] = {}  # equal completions are scored once
        for row, completion in enumerate(completions):
            key = row.to_bytes(8)
            if spec.cache:
                key = hashlib.blake2b(pickle.dumps(completion), digest_size=16).digest()
            if (index, key) in self._cache:
                scores[row] = self._cache[index, key]
            else:
                rows.setdefault(key, []).append(row)
        calls: dict[object, list[tuple[bytes, list[int]]]] = {}
        for key, equal in rows.items():
            prompt_id = completions[equal[0]].prompt_id
            together = {"response": key, "batch": None, "group": prompt_id}[spec.unit]
            calls.setdefault(together, []).append((key, equal))
        for parts in calls.values():
            firsts = [completions[equal[0]] for _, equal in parts]
            yield _Unit(function=index, completions=firsts, name=name, rows=parts)


def _last_turn(chunk: RolloutChunk, row: int) -> tuple[int, ...]:
    """Returns the ids that were sampled in the last turn; the whole response where that is the only one."""
    ids = chunk.response_ids[row]
    if chunk.loss_mask is not None and chunk.turns is not None:
        ends = chunk.turns[row].tolist()
        start = ends[-2] if len(ends) > 1 else 0
        ids = ids[chunk.loss_mask[row]][start:]
    return tuple(ids.tolist())
