"""The processes that run reward functions; they share the samples of a step and return scores by chunk."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.cluster.calls import Call
from megarl.cluster.rollouts import Rollouts
from megarl.cluster.session import Session
from megarl.cluster.workers import WorkerGroup
from megarl.config import EvalConfig, PPOConfig, RAFTConfig
from megarl.config.schema import Reward, RewardFunction, TimeLimits
from megarl.data.packing import Chunks
from megarl.data.tokenizer import has_tokenizer, load_tokenizer
from megarl.remote import remote
from megarl.rewards.functions import labels
from megarl.rewards.scorer import Failures, RuleScorer, Scores
from megarl.types import Prompt, RolloutChunk


@dataclass(frozen=True, kw_only=True)
class ScoreRequest:
    """Rows of chunks to score.

    Args:
        functions: index of each function to call, by name.
        prompts: by chunk and row.
    """

    functions: Mapping[str, int]
    rollouts: Chunks[RolloutChunk]
    prompts: Mapping[int, Mapping[int, Prompt]]


@dataclass(frozen=True, kw_only=True)
class ScoredRows:
    """Scores of some rows of chunks, and the first failure of each kind.

    Args:
        places: chunk and row of each score.
    """

    places: Sequence[tuple[int, int]]
    scores: Scores
    failures: Failures


class ScoringProcess:
    """Decodes responses, and calls reward functions in a child process.

    Args:
        tokenizer: directory of the tokenizer that decodes responses; None leaves the texts empty.
        functions: all functions of the run.
        seconds: time limit of all calls of a step.
    """

    def __init__(
        self, tokenizer: str | None, functions: Sequence[RewardFunction], reward: Reward, seconds: float
    ) -> None:
        decode = None if tokenizer is None else load_tokenizer(tokenizer).decode
        self._scorer = RuleScorer(functions, decode, reward)
        self._seconds = seconds

    @remote(phase="start")
    def start(self) -> None:
        """Loads the functions."""
        self._scorer.start()

    @remote(phase="scoring")
    def score(self, request: ScoreRequest) -> ScoredRows:
        """Scores some rows of chunks."""
        deadline = time.monotonic() + self._seconds
        completions = [
            completion
            for chunk, prompts in request.prompts.items()
            for completion in self._scorer.completions(request.rollouts[chunk], prompts)
        ]
        places = [(chunk, row) for chunk, prompts in request.prompts.items() for row in prompts]
        scores, failures = self._scorer.score(request.functions, completions, deadline)
        return ScoredRows(places=places, scores=scores, failures=failures)

    @remote(phase="start")
    def close(self) -> None:
        """Ends the child process and its children."""
        self._scorer.close()


class RuleScorers(WorkerGroup[ScoringProcess]):
    """Scoring processes, spread over the nodes of the run; they use no device.

    Args:
        tokenizer: directory of the tokenizer; None without one.
        functions: all functions of the run.
        warn: called with the first failure of each kind of each function.

    Attributes:
        failures: the last ones, one of each kind of each function.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: str | None,
        functions: Sequence[RewardFunction],
        reward: Reward,
        limits: TimeLimits,
        warn: Callable[[str], None],
    ) -> None:
        self._functions, self._warn = tuple(functions), warn
        self._reported: set[tuple[str, str]] = set()
        self.failures: list[str] = []
        devices, count = len(session.placement.slots), reward.processes
        args = (tokenizer, self._functions, reward, limits.calls)
        processes = [
            session.launch_at(f"scorer {index}", index * devices // count, (), ScoringProcess, *args)
            for index in range(count)
        ]
        super().__init__(session, "scorers", processes)

    def start(self) -> Call[None]:
        """Loads the functions; returns at once."""
        return self.call(ScoringProcess.start)

    def close(self) -> Call[None]:
        """Lets every process end by itself; returns at once."""
        return self.call(ScoringProcess.close)

    def score(
        self, functions: Sequence[RewardFunction], rollouts: Rollouts, prompts: Mapping[str, Prompt]
    ) -> Call[ScoredRows]:
        """Scores every sample with every function; returns at once. `prompts` are by prompt id.

        Processes share the chunks, or the prompts if a function scores all responses to one together.
        """
        indices = {label: self._functions.index(own) for label, own in zip(labels(functions), functions, strict=True)}
        by_prompt = any(function.unit == "group" for function in functions)
        numbers: dict[str, int] = {}  # of the prompts
        shares: dict[int, dict[int, dict[int, Prompt]]] = {}  # by process, chunk and row
        for sample in sorted(rollouts.samples, key=lambda sample: (sample.chunk, sample.row)):
            number = numbers.setdefault(sample.prompt_id, len(numbers)) if by_prompt else sample.chunk
            own = shares.setdefault(number % len(self.processes), {})
            own.setdefault(sample.chunk, {})[sample.row] = prompts[sample.prompt_id]
        requests = [
            ScoreRequest(functions=indices, rollouts=rollouts.chunks.only(own), prompts=own) for own in shares.values()
        ]
        processes = [self.processes[index] for index in shares]
        return self.submit(ScoringProcess.score, [(request,) for request in requests], processes=processes)

    def gather(self, call: Call[ScoredRows]) -> dict[int, Scores]:
        """Waits for the scores of `submit`, by chunk, and warns of failures; a sample without a score has NaN."""
        results = call.wait()
        failures = {kind: unscored for result in reversed(results) for kind, unscored in result.failures.items()}
        if failures:
            self.failures = [
                f"reward function {name!r} on prompt {unscored.prompt_id!r}: {unscored.failure.reason}"
                for (name, _), unscored in failures.items()
            ]
        for (name, kind), unscored in failures.items():
            if (name, kind) in self._reported:
                continue
            self._reported.add((name, kind))
            self._warn(
                f"reward function {name!r} gave prompt {unscored.prompt_id!r} no score (calls: {unscored.calls}); the "
                "response counts as unscored. Similar failures are not shown again; rewards/unscored counts them all.\n"
                f"{unscored.failure.reason}"
            )
        chunks, rows = np.array([place for result in results for place in result.places]).T
        order = np.lexsort((rows, chunks))
        columns = {name: np.concatenate([result.scores[name] for result in results]) for name in results[0].scores}
        return {
            int(chunk): {name: column[order][chunks[order] == chunk] for name, column in columns.items()}
            for chunk in np.unique(chunks)
        }


def launch_scorers(config: PPOConfig | RAFTConfig | EvalConfig, session: Session, model_dir: str) -> RuleScorers | None:
    """Launches the scoring processes, and returns at once; None without reward functions."""
    evaluated = config.evaluation.functions if config.evaluation is not None else ()
    functions = [*config.reward.functions, *evaluated]
    if not functions:
        return None
    directory = config.model.tokenizer_directory(model_dir)
    tokenizer = directory if has_tokenizer(directory) else None
    warn = functools.partial(print, file=sys.stderr, flush=True)
    return RuleScorers(session, tokenizer, functions, config.reward, config.cluster.time_limits, warn)
