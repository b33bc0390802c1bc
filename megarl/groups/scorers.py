"""The processes that run reward functions; they share the samples of a step and return scores by chunk."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from megarl.cluster.calls import Call, Process
from megarl.cluster.session import Session
from megarl.cluster.workers import WorkerGroup
from megarl.config import SamplingConfig
from megarl.config.schema import Reward, RewardFunction, TimeLimits
from megarl.data.packing import Chunks
from megarl.data.tokenizer import has_tokenizer, load_tokenizer
from megarl.groups.rollouts import Rollouts, split
from megarl.remote import RemoteMethod, remote
from megarl.rewards.adapters import Failure
from megarl.rewards.completion import Completion
from megarl.rewards.functions import labels
from megarl.rewards.judge import JUDGE_MODEL, JudgePrompts
from megarl.rewards.scorer import Failures, RuleScorer, Scores, Unscored
from megarl.texts import printable
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


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question to the judge about a sample; one with a problem is left out.

    Args:
        place: chunk and row of the sample.
        answer: chunk and row of the answer.
    """

    place: tuple[int, int]
    prompt_id: str
    token_ids: tuple[int, ...]
    problem: str | None = None
    answer: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class AnswerRequest:
    """Questions, and the chunks with their answers."""

    questions: Sequence[Question]
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
        completions: list[Completion] = []
        places: list[tuple[int, int]] = []
        for chunk, prompts in request.prompts.items():
            completions += self._scorer.completions(request.rollouts[chunk], prompts)
            places += [(chunk, row) for row in prompts]
        scores, failures = self._scorer.score(request.functions, completions, deadline)
        return ScoredRows(places=places, scores=scores, failures=failures)

    @remote(phase="scoring")
    def questions(self, request: ScoreRequest) -> list[Question]:
        """Returns the questions to the judge about some rows of chunks."""
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
        failures: dict[tuple[str, str], Unscored] = {}
        for index, question in enumerate(request.questions):
            try:
                if question.answer is None:
                    raise ValueError(question.problem)
                chunk, row = question.answer
                answers = request.answers[chunk]
                ids = answers.response_ids[row].tolist()
                scores[index] = self._judge.read(ids, bool(answers.finished[row]))
            except ValueError as error:
                failure = Failure(kind=type(error).__name__, reason=str(error))
                unscored = Unscored(prompt_id=question.prompt_id, failure=failure, calls=1)
                failures.setdefault((JUDGE_MODEL, failure.kind), unscored)
        places = [question.place for question in request.questions]
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
    ) -> None:
        self._functions = tuple(functions)
        self._reported: set[tuple[str, str]] = set()
        self.failures: list[str] = []
        worker = partial(ScoringProcess, tokenizer, self._functions, reward, limits.calls)
        processes: list[Process[ScoringProcess]] = []
        for index, place in enumerate(session.spread(reward.processes)):
            processes.append(session.launch(f"scorer {index}", worker, place=place))
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

        Processes share the chunks, or the prompts if a function scores all responses
        to one together.
        """
        indices: dict[str, int] = {}
        for label, function in zip(labels(functions), functions, strict=True):
            indices[label] = self._functions.index(function)
        by_prompt = any(function.unit == "group" for function in functions)
        return self._share(ScoringProcess.score, indices, rollouts, prompts, by_prompt=by_prompt)

    def questions(self, rollouts: Rollouts, prompts: Mapping[str, Prompt]) -> Call[list[Question]]:
        """Writes the questions to the judge about every sample; returns at once. `prompts` are by prompt id."""
        return self._share(ScoringProcess.questions, {}, rollouts, prompts)

    def read(self, questions: Sequence[Question], answers: Rollouts) -> Call[ScoredRows]:
        """Reads the scores in the judge's answers to the questions without a problem; returns at once."""
        samples = iter(answers.samples)
        placed: list[Question] = []
        for question in questions:
            if question.problem is None:
                sample = next(samples)
                placed.append(replace(question, answer=(sample.chunk, sample.row)))
            else:
                placed.append(question)
        requests: list[AnswerRequest] = []
        for part in split(placed, len(self.processes)):
            chunks = {question.answer[0] for question in part if question.answer is not None}
            requests.append(AnswerRequest(questions=part, answers=answers.chunks.only(chunks)))
        return self.call_each(ScoringProcess.read, requests)

    def _share[R](
        self,
        method: RemoteMethod[ScoringProcess, [ScoreRequest], R],
        functions: Mapping[str, int],
        rollouts: Rollouts,
        prompts: Mapping[str, Prompt],
        *,
        by_prompt: bool = False,
    ) -> Call[R]:
        """Calls a method with every sample, by chunk or by prompt."""
        numbers: dict[str, int] = {}  # by prompt
        shares: dict[int, dict[int, dict[int, Prompt]]] = {}  # by process, chunk and row
        for sample in sorted(rollouts.samples, key=lambda sample: (sample.chunk, sample.row)):
            number = sample.chunk
            if by_prompt:
                number = numbers.setdefault(sample.prompt_id, len(numbers))
            share = shares.setdefault(number % len(self.processes), {})
            share.setdefault(sample.chunk, {})[sample.row] = prompts[sample.prompt_id]
        requests: list[tuple[ScoreRequest]] = []
        for share in shares.values():
            chunks = rollouts.chunks.only(share)
            requests.append((ScoreRequest(functions=functions, rollouts=chunks, prompts=share),))
        return self.submit(method, requests, processes=[self.processes[index] for index in shares])

    async def gather(self, call: Call[ScoredRows]) -> dict[int, Scores]:
        """Waits for scores, by chunk, and warns of failures; a sample without a score has NaN."""
        results = await call
        failures: dict[tuple[str, str], Unscored] = {}
        places: list[tuple[int, int]] = []
        for result in results:
            places += result.places
            for kind, unscored in result.failures.items():
                failures.setdefault(kind, unscored)
        if failures:
            self.failures = []
        for (name, kind), unscored in failures.items():
            reason = unscored.failure.reason
            self.failures.append(f"reward function {name!r} on prompt {unscored.prompt_id!r}: {reason}")
            if (name, kind) not in self._reported:
                self._reported.add((name, kind))
                print(
                    f"reward function {name!r} gave prompt {unscored.prompt_id!r} no score (calls: {unscored.calls}); "
                    "the response counts as unscored. Similar failures are not shown again; rewards/unscored counts "
                    f"them all.\n{printable(reason)}",
                    file=sys.stderr,
                )
        chunks, rows = np.array(places).T
        order = np.lexsort((rows, chunks))
        numbers, starts = np.unique(chunks[order], return_index=True)
        scores: dict[int, Scores] = {int(chunk): {} for chunk in numbers}
        for name in results[0].scores:
            column = np.concatenate([result.scores[name] for result in results])[order]
            for columns, part in zip(scores.values(), np.split(column, starts[1:]), strict=True):
                columns[name] = part
        return scores


def launch_scorers(config: SamplingConfig, session: Session, model_dir: str) -> RuleScorers | None:
    """Launches the scoring processes, and returns at once; None without reward functions and a judge."""
    functions = [*config.reward.functions]
    if config.evaluation is not None:
        functions += config.evaluation.functions
    if not functions and config.reward.judge_model is None:
        return None
    directory = config.model.tokenizer_directory(model_dir)
    tokenizer = directory if has_tokenizer(directory) else None
    return RuleScorers(session, tokenizer, functions, config.reward, config.cluster.time_limits)
