"""The processes that run reward functions; they share the samples of a step and return scores by chunk."""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from megarl.cluster.calls import Call
from megarl.cluster.ray_worker import ChunkRefs
from megarl.cluster.session import Session
from megarl.cluster.workers import WorkerGroup
from megarl.config import SamplingConfig
from megarl.config.schema import Reward, RewardFunction, TimeLimits
from megarl.data.packing import Chunks
from megarl.data.tokenizer import has_tokenizer, load_tokenizer
from megarl.groups.rollouts import Rollouts, split
from megarl.remote import RemoteMethod, remote
from megarl.rewards.adapters import Failure
from megarl.rewards.functions import labels
from megarl.rewards.judge import JUDGE_MODEL, JudgePrompts
from megarl.rewards.scorer import Failures, RuleScorer, Scores, Unscored
from megarl.texts import printable
from megarl.types import Prompt, RolloutChunk

R = TypeVar("R")


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


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question to the judge about the sample in a row of a chunk; one with a problem is not asked."""

    place: tuple[int, int]
    prompt_id: str
    token_ids: tuple[int, ...]
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class AnswerRequest:
    """Questions, and the chunk and row of each one's answer."""

    questions: Sequence[tuple[Question, tuple[int, int] | None]]
    answers: Chunks[RolloutChunk]


class ScoringProcess:
    """Decodes responses, calls reward functions in a child process, and writes and reads for the judge.

    Args:
        tokenizer: directory of the tokenizer that decodes responses; None leaves the texts empty.
        functions: all functions of the run.
        seconds: time limit of all calls of a step.
    """

    def __init__(
        self, tokenizer: str | None, functions: Sequence[RewardFunction], reward: Reward, seconds: float
    ) -> None:
        self._functions = functions
        decode = None if tokenizer is None else load_tokenizer(tokenizer).decode
        self._scorer = RuleScorer(functions, decode, reward)
        self._judge = None if reward.judge_model is None else JudgePrompts(reward.judge_model)
        self._seconds = seconds

    @remote(phase="start")
    def start(self) -> None:
        """Loads the functions."""
        if self._functions:
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

    @remote(phase="scoring")
    def questions(self, request: ScoreRequest) -> list[Question]:
        """Returns what the judge is asked about some rows of chunks."""
        assert self._judge is not None
        found: list[Question] = []
        for chunk, prompts in request.prompts.items():
            completions = self._scorer.completions(request.rollouts[chunk], prompts)
            for row, completion in zip(prompts, completions, strict=True):
                ids, problem = self._judge.ask(completion)
                place = (chunk, row)
                prompt_id = completion.prompt_id
                found.append(Question(place=place, prompt_id=prompt_id, token_ids=ids, problem=problem))
        return found

    @remote(phase="scoring")
    def read(self, request: AnswerRequest) -> ScoredRows:
        """Returns the scores in the judge's answers."""
        assert self._judge is not None
        scores = np.full(len(request.questions), math.nan, np.float32)
        failures = dict[tuple[str, str], Unscored]()
        for index, (question, at) in enumerate(request.questions):
            try:
                if at is None:
                    raise ValueError(question.problem)
                chunk = request.answers[at[0]]
                scores[index] = self._judge.read(chunk.response_ids[at[1]].tolist(), bool(chunk.finished[at[1]]))
            except ValueError as error:
                failure = Failure(kind=type(error).__name__, reason=str(error))
                unscored = Unscored(prompt_id=question.prompt_id, failure=failure, calls=1)
                failures.setdefault((JUDGE_MODEL, failure.kind), unscored)
        places = [question.place for question, _ in request.questions]
        return ScoredRows(places=places, scores={JUDGE_MODEL: scores}, failures=failures)

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
        self._functions = tuple(functions)
        self._warn = warn
        self._reported: set[tuple[str, str]] = set()
        self.failures: list[str] = []
        devices = len(session.placement.slots)
        count = reward.processes
        args = (tokenizer, self._functions, reward, limits.calls)
        processes = [
            session.launch_at(f"scorer {index}", index * devices // count, ScoringProcess, *args)
            for index in range(count)
        ]
        super().__init__(session, "scorers", processes)

    async def start(self) -> None:
        """Loads the functions."""
        await self.call(ScoringProcess.start)

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
        return self._share(ScoringProcess.score, indices, rollouts, prompts, by_prompt=by_prompt)

    def questions(self, rollouts: Rollouts, prompts: Mapping[str, Prompt]) -> Call[list[Question]]:
        """Writes what the judge is asked about every sample; returns at once. `prompts` are by prompt id."""
        return self._share(ScoringProcess.questions, {}, rollouts, prompts)

    def read(self, questions: Sequence[Question], answers: Rollouts | None) -> Call[ScoredRows]:
        """Reads the scores in the judge's answers to the questions without a problem; returns at once."""
        samples = iter(() if answers is None else answers.samples)
        placed: list[tuple[Question, tuple[int, int] | None]] = []
        for question in questions:
            answer = None if question.problem is not None else next(samples)
            placed.append((question, None if answer is None else (answer.chunk, answer.row)))
        requests: list[AnswerRequest] = []
        for part in split(placed, len(self.processes)):
            chunks = ChunkRefs[RolloutChunk]({}) if answers is None else answers.chunks
            own = chunks.only({at[0] for _, at in part if at is not None})
            requests.append(AnswerRequest(questions=part, answers=own))
        return self.call_each(ScoringProcess.read, requests)

    def _share(
        self,
        method: RemoteMethod[ScoringProcess, [ScoreRequest], R],
        functions: Mapping[str, int],
        rollouts: Rollouts,
        prompts: Mapping[str, Prompt],
        *,
        by_prompt: bool = False,
    ) -> Call[R]:
        """Calls a method with every sample, by chunk or by prompt."""
        numbers: dict[str, int] = {}  # of the prompts
        shares: dict[int, dict[int, dict[int, Prompt]]] = {}  # by process, chunk and row
        for sample in sorted(rollouts.samples, key=lambda sample: (sample.chunk, sample.row)):
            number = numbers.setdefault(sample.prompt_id, len(numbers)) if by_prompt else sample.chunk
            own = shares.setdefault(number % len(self.processes), {})
            own.setdefault(sample.chunk, {})[sample.row] = prompts[sample.prompt_id]
        requests = [
            ScoreRequest(functions=functions, rollouts=rollouts.chunks.only(own), prompts=own)
            for own in shares.values()
        ]
        processes = [self.processes[index] for index in shares]
        return self.submit(method, [(request,) for request in requests], processes=processes)

    async def gather(self, call: Call[ScoredRows]) -> dict[int, Scores]:
        """Waits for the scores of `submit`, by chunk, and warns of failures; a sample without a score has NaN."""
        results = await call
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
                f"{printable(unscored.failure.reason)}"
            )
        chunks, rows = np.array([place for result in results for place in result.places]).T
        order = np.lexsort((rows, chunks))
        columns = {name: np.concatenate([result.scores[name] for result in results]) for name in results[0].scores}
        return {
            int(chunk): {name: column[order][chunks[order] == chunk] for name, column in columns.items()}
            for chunk in np.unique(chunks)
        }


def launch_scorers(config: SamplingConfig, session: Session, model_dir: str) -> RuleScorers | None:
    """Launches the scoring processes, and returns at once; None without reward functions and a judge."""
    evaluated = config.evaluation.functions if config.evaluation is not None else ()
    functions = [*config.reward.functions, *evaluated]
    if not functions and config.reward.judge_model is None:
        return None
    directory = config.model.tokenizer_directory(model_dir)
    tokenizer = directory if has_tokenizer(directory) else None
    warn = functools.partial(print, file=sys.stderr, flush=True)
    return RuleScorers(session, tokenizer, functions, config.reward, config.cluster.time_limits, warn)
