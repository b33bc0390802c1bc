"""The processes that run reward functions: they share the samples of a step and return small columns of scores."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megarl.cluster.calls import Call
from megarl.cluster.engines import Rollouts
from megarl.cluster.ray_worker import ChunkRefs
from megarl.cluster.session import Session
from megarl.config.schema import Reward, RewardFunction, TimeLimits
from megarl.data.tokenizer import load_tokenizer
from megarl.rewards.functions import labels
from megarl.rewards.scorer import Failures, RuleScorer, Scores, Unscored
from megarl.types import Prompt, RolloutChunk, SampleInfo

SCORER = "megarl.cluster.scorers:ScoringProcess"


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

    def start(self) -> None:
        """Loads the functions."""
        self._scorer.start()

    def score(
        self,
        functions: Mapping[str, int],
        rollouts: ChunkRefs[RolloutChunk],
        prompts: Mapping[int, Sequence[Prompt]],
    ) -> ScoredChunks:
        """The scores of some chunks.

        Args:
            functions: which of the functions score, by name.
            rollouts: by chunk.
            prompts: by chunk, those of its rows.
        """
        deadline = time.monotonic() + self._seconds
        columns: dict[int, Scores] = {}
        failures: dict[tuple[str, str], Unscored] = {}
        for chunk, of_rows in prompts.items():
            columns[chunk], failed = self._scorer.score(functions, rollouts[chunk], of_rows, deadline)
            for kind, unscored in failed.items():
                failures.setdefault(kind, unscored)
        return ScoredChunks(columns=columns, failures=failures)

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

    call: Call
    tell: Callable[[Failures], None]

    def wait(self) -> dict[int, Scores]:
        """The scores by chunk; NaN where a function left a sample without one.

        Raises:
            WorkerError: a process failed.
        """
        results: list[ScoredChunks] = self.call.wait()
        for result in results:
            self.tell(result.failures)
        return {chunk: scores for result in results for chunk, scores in result.columns.items()}


class RuleScorers:
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
        self._watch, self._functions, self._warn = session.watch, tuple(functions), warn
        self._told: set[tuple[str, str]] = set()
        devices, count = len(session.placement.slots), reward.processes
        arguments = (tokenizer, self._functions, reward, limits.calls)
        self.processes = [
            session.launch_beside(f"scorer {index}", index * devices // count, SCORER, *arguments)
            for index in range(count)
        ]

    def start(self) -> Call:
        """Loads the tokenizer and the functions in every process."""
        return self._watch.submit("scorers.start", "start", "start", self.processes, [()] * len(self.processes))

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
        args = [(numbers, rollouts.chunks.only(share), share) for share in shares]
        call = self._watch.submit("scorers.score", "scoring", "score", self.processes[:count], args)
        return PendingScores(call=call, tell=self._tell)

    def close(self) -> Call:
        """Lets every process end its child."""
        return self._watch.submit("scorers.close", "start", "close", self.processes, [()] * len(self.processes))

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


def _prompts_by_chunk(samples: Sequence[SampleInfo], prompts: Mapping[str, Prompt]) -> dict[int, list[Prompt]]:
    """By chunk, the prompt of each row."""
    of_rows: dict[int, list[Prompt]] = {}
    for sample in sorted(samples, key=lambda sample: (sample.chunk, sample.row)):
        of_rows.setdefault(sample.chunk, []).append(prompts[sample.prompt_id])
    return of_rows
