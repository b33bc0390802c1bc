"""The processes that run reward functions: they share the samples of a step and return small columns of scores."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megarl.cluster.calls import Call
from megarl.cluster.engines import Rollouts
from megarl.cluster.session import Session
from megarl.cluster.workers import WorkerGroup
from megarl.config import EvalConfig, PPOConfig, RAFTConfig
from megarl.config.schema import Reward, RewardFunction, TimeLimits
from megarl.data.packing import Chunks
from megarl.data.tokenizer import has_tokenizer, load_tokenizer
from megarl.remote import remote
from megarl.rewards.functions import labels
from megarl.rewards.scorer import Failures, RuleScorer, Scores, Unscored
from megarl.types import Prompt, RolloutChunk, SampleInfo


@dataclass(frozen=True, kw_only=True)
class ScoreRequest:
    """Chunks to score.

    Args:
        functions: which of the functions score, by name.
        rollouts: by chunk.
        prompts: by chunk, those of its rows.
    """

    functions: Mapping[str, int]
    rollouts: Chunks[RolloutChunk]
    prompts: Mapping[int, Sequence[Prompt]]


@dataclass(frozen=True, kw_only=True)
class ScoredChunks:
    """The scores of some chunks.

    Args:
        columns: by chunk.
        failures: the first of each kind.
    """

    columns: Mapping[int, Scores]
    failures: Failures


class ScoringProcess:
    """What runs in each process: it decodes responses, and lets a child of its own call the functions.

    Args:
        tokenizer: directory of the tokenizer that makes the texts of the answers; None leaves them empty.
        functions: all that will be called.
        reward: with the limits of the calls.
        seconds: for all calls of a step.
    """

    def __init__(
        self, tokenizer: str | None, functions: Sequence[RewardFunction], reward: Reward, seconds: float
    ) -> None:
        decode = None if tokenizer is None else load_tokenizer(tokenizer).decode
        self._scorer = RuleScorer(functions, decode, time_limit=reward.time_limit, retries=reward.retries)
        self._seconds = seconds

    @remote(phase="start")
    def start(self) -> None:
        """Loads the functions."""
        self._scorer.start()

    @remote(phase="scoring")
    def score(self, request: ScoreRequest) -> ScoredChunks:
        """Scores some chunks."""
        deadline = time.monotonic() + self._seconds
        columns: dict[int, Scores] = {}
        failures: dict[tuple[str, str], Unscored] = {}
        for chunk, of_rows in request.prompts.items():
            columns[chunk], failed = self._scorer.score(request.functions, request.rollouts[chunk], of_rows, deadline)
            for kind, unscored in failed.items():
                failures.setdefault(kind, unscored)
        return ScoredChunks(columns=columns, failures=failures)

    @remote(phase="start")
    def close(self) -> None:
        """Ends the child, and what the functions have started in it."""
        self._scorer.close()


@dataclass(frozen=True, kw_only=True)
class PendingScores:
    """Scores in the making.

    Args:
        call: to all processes.
        tell: is told of each process's first failures of each kind.
    """

    call: Call[ScoredChunks]
    tell: Callable[[Failures], None]

    def wait(self) -> dict[int, Scores]:
        """The scores by chunk; NaN where a function left a sample without one.

        Raises:
            WorkerError: a process failed.
        """
        results = self.call.wait()
        for result in results:
            self.tell(result.failures)
        return {chunk: scores for result in results for chunk, scores in result.columns.items()}


class RuleScorers(WorkerGroup[ScoringProcess]):
    """Processes without a device of their own, spread over the nodes of the run.

    Args:
        session: where they run.
        tokenizer: directory of the tokenizer; None where the run has none.
        functions: all that will be called.
        reward: how many processes, and the limits of the calls.
        limits: of the phases of a step.
        warn: is told of the first failure of each kind of each function.
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
        self._told: set[tuple[str, str]] = set()
        devices, count = len(session.placement.slots), reward.processes
        processes = [
            session.launch_beside(
                f"scorer {index}",
                index * devices // count,
                ScoringProcess,
                tokenizer,
                self._functions,
                reward,
                limits.calls,
            )
            for index in range(count)
        ]
        super().__init__(session, "scorers", processes)

    def score(
        self, functions: Sequence[RewardFunction], rollouts: Rollouts, prompts: Mapping[str, Prompt]
    ) -> PendingScores:
        """Scores samples; returns at once.

        Args:
            functions: that score, all of them every sample.
            rollouts: of the step.
            prompts: by prompt id, those of the rollouts.
        """
        numbers = {label: self._functions.index(own) for label, own in zip(labels(functions), functions, strict=True)}
        of_rows = _prompts_by_chunk(rollouts.samples, prompts)
        count = min(len(self.processes), len(of_rows))
        shares = [{chunk: of_rows[chunk] for chunk in sorted(of_rows)[index::count]} for index in range(count)]
        requests = [
            ScoreRequest(functions=numbers, rollouts=rollouts.chunks.only(share), prompts=share) for share in shares
        ]
        return PendingScores(call=self.call_each(ScoringProcess.score, requests), tell=self._tell)

    def _tell(self, failures: Failures) -> None:
        """Shows each kind of failure of a function once; the metrics count them all."""
        for (name, kind), unscored in failures.items():
            if (name, kind) in self._told:
                continue
            self._told.add((name, kind))
            self._warn(
                f"reward function {name!r} gave prompt {unscored.prompt_id!r} no score (calls: {unscored.calls}); the "
                "response counts as unscored. Failures alike are not shown again: rewards/unscored counts them all.\n"
                f"{unscored.failure.reason}"
            )


def launch_scorers(config: PPOConfig | RAFTConfig | EvalConfig, session: Session, model_dir: str) -> RuleScorers | None:
    """Launches the processes that run reward functions, if there are any, and returns at once."""
    evaluated = config.evaluation.functions if config.evaluation is not None else ()
    functions = [*config.reward.functions, *evaluated]
    if not functions:
        return None
    directory = config.model.tokenizer or model_dir
    tokenizer = directory if has_tokenizer(directory) else None
    warn = functools.partial(print, file=sys.stderr, flush=True)
    return RuleScorers(session, tokenizer, functions, config.reward, config.cluster.time_limits, warn)


def _prompts_by_chunk(samples: Sequence[SampleInfo], prompts: Mapping[str, Prompt]) -> dict[int, list[Prompt]]:
    """By chunk, the prompt of each row."""
    of_rows: dict[int, list[Prompt]] = {}
    for sample in sorted(samples, key=lambda sample: (sample.chunk, sample.row)):
        of_rows.setdefault(sample.chunk, []).append(prompts[sample.prompt_id])
    return of_rows
