"""Results of a step and of an evaluation, and the samples in them for people to read."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megarl.data.branches import Branches
from megarl.data.stream import stable_hash
from megarl.data.tokenizer import Tokenizer
from megarl.groups.rollouts import Rollouts
from megarl.run.sinks import Metrics
from megarl.types import ConversationOutcome, Prompt, Ragged, RolloutChunk, SampleInfo


@dataclass(frozen=True, kw_only=True)
class ShownTurn:
    """What the model wrote in a turn of a conversation, or what was given between two turns.

    Args:
        text: with special tokens, or token ids if the run has no tokenizer.
        reward: of a turn, by the environment; None of what was given.
    """

    sampled: bool
    text: str | tuple[int, ...]
    tokens: int
    reward: float | None = None


@dataclass(frozen=True, kw_only=True)
class ShownSample:
    """A prompt, a response to it, and its scores.

    Args:
        prompt, response: text without special tokens, or token ids if the run has no tokenizer.
        text: both as one text with special tokens; None without a tokenizer.
        fields: the other columns of the prompt's row.
        prompt_tokens, response_tokens: their numbers; given tokens are in the response, and not counted.
        versions: of the weights that generated the response, in their order.
        finished: False if the response was cut off at the length limit.
        score: the training score; in an evaluation the reward model's, or else that of the first function.
        scores: unweighted, by reward.
        advantage: of the response; None where advantages are of tokens, and in an evaluation.
        tokens: of each response token, by name: `text`, if there is a tokenizer, and values; None where not kept. With
            given tokens also `loss_mask`, 1 where a token was sampled; the values of the others are None.
        turns: the response of a conversation, in order.
        outcome: how the conversation ended.
    """

    sample_id: str
    prompt_id: str
    prompt: str | tuple[int, ...]
    response: str | tuple[int, ...]
    text: str | None
    fields: Mapping[str, Any]
    prompt_tokens: int
    response_tokens: int
    versions: tuple[int, ...]
    finished: bool
    score: float
    scores: Mapping[str, float]
    advantage: float | None
    tokens: Mapping[str, Sequence[str | float | None]] | None = None
    turns: Sequence[ShownTurn] | None = None
    outcome: ConversationOutcome | None = None


TokenColumns = Callable[[int], Mapping[str, Ragged]]
"""Returns the columns of a chunk by name, each with a value per sampled token."""


def no_columns(chunk: int) -> Mapping[str, Ragged]:
    """Returns none; the engines' log-probabilities are in the chunk itself."""
    return {}


def shown_samples(
    rollouts: Rollouts,
    prompts: Mapping[str, Prompt],
    scores: npt.NDArray[np.float32],
    by_reward: Mapping[str, npt.NDArray[np.float32]],
    tokenizer: Tokenizer | None,
    count: int | Literal["all"],
    advantages: npt.NDArray[np.float32] | None = None,
    columns: TokenColumns | None = None,
) -> list[ShownSample]:
    """Returns about `count` samples, all those of some prompts, fetching only their chunks.

    Half of the prompts are the same whenever a step has them, the others are spread over the step.

    Args:
        prompts: by prompt id.
        scores: [C], of conversations.
        by_reward: [C] each.
        advantages: [N].
        columns: beside the engines' log-probabilities; None does not keep values of tokens.
    """
    pieces: dict[int, str] = {}
    conversations = Branches.of(rollouts.samples).conversation

    def text(ids: npt.NDArray[np.int32]) -> str | tuple[int, ...]:
        return tuple(ids.tolist()) if tokenizer is None else tokenizer.decode(ids.tolist())

    shown: list[ShownSample] = []
    most = len(rollouts.samples) if count == "all" else count
    for index in _of_some_prompts([sample.prompt_id for sample in rollouts.samples], most):
        sample = rollouts.samples[index]
        conversation = conversations[index]
        chunk = rollouts.chunks[sample.chunk]
        prompt_ids = chunk.prompt_ids[sample.row]
        response_ids = chunk.response_ids[sample.row]
        ids = [*prompt_ids.tolist(), *response_ids.tolist()]
        shown.append(
            ShownSample(
                sample_id=sample.sample_id,
                prompt_id=sample.prompt_id,
                prompt=text(prompt_ids),
                response=text(response_ids),
                text=None if tokenizer is None else tokenizer.decode(ids, special=True),
                fields=json.loads(json.dumps(dict(prompts[sample.prompt_id].fields), default=str)),
                prompt_tokens=sample.prompt_tokens,
                response_tokens=sample.response_tokens,
                versions=tuple(dict.fromkeys(span.version for span in chunk.versions[sample.row])),
                finished=sample.finished,
                score=float(scores[conversation]),
                scores={name: float(values[conversation]) for name, values in by_reward.items()},
                advantage=None if advantages is None else float(advantages[index]),
                tokens=None if columns is None else _tokens(chunk, sample, columns(sample.chunk), tokenizer, pieces),
                turns=None if sample.outcome is None else _turns(chunk, sample, tokenizer),
                outcome=sample.outcome,
            )
        )
    return shown


def _turns(chunk: RolloutChunk, sample: SampleInfo, tokenizer: Tokenizer | None) -> list[ShownTurn]:
    """Returns the turns of a conversation's branch, and what was given between them."""
    assert chunk.loss_mask is not None
    assert chunk.turns is not None
    prompt = chunk.prompt_ids[sample.row]
    ids = chunk.response_ids[sample.row]
    sampled = np.flatnonzero(chunk.loss_mask[sample.row])
    turns = list[ShownTurn]()
    place = 0

    def add(stop: int, reward: float | None) -> None:
        nonlocal place
        before = (ids[place - 1 : place] if place else prompt[-1:]).tolist()
        piece = ids[place:stop].tolist()
        text = tuple(piece) if tokenizer is None else _text_after(tokenizer, before, piece)
        turns.append(ShownTurn(sampled=reward is not None, text=text, tokens=len(piece), reward=reward))
        place = stop

    assert chunk.turn_rewards is not None
    starts = [0, *chunk.turns[sample.row].tolist()]
    rewards = [float(f"{reward:.6g}") for reward in chunk.turn_rewards[sample.row].tolist()]
    for first, end, reward in zip(starts, starts[1:], rewards, strict=False):
        if end > first and sampled[first] > place:
            add(int(sampled[first]), None)
        add(int(sampled[end - 1]) + 1 if end > first else place, reward)
    return turns


def _text_after(tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int]) -> str:
    """Decodes ids as they read after others: some tokenizers drop the space before a first token."""
    return tokenizer.decode([*before, *ids], special=True)[len(tokenizer.decode(before, special=True)) :]


def _tokens(
    chunk: RolloutChunk,
    sample: SampleInfo,
    columns: Mapping[str, Ragged],
    tokenizer: Tokenizer | None,
    pieces: dict[int, str],
) -> dict[str, Sequence[str | float | None]]:
    """Returns the values of a response's tokens, with six digits; adds to `pieces`, the texts of tokens."""
    ids = chunk.response_ids[sample.row].tolist()
    tokens = dict[str, Sequence[str | float | None]]()
    if tokenizer is not None:
        before = chunk.prompt_ids[sample.row].tolist()[-1:]
        for token in set(ids) - set(pieces):
            pieces[token] = _text_after(tokenizer, before, [token])
        tokens["text"] = [pieces[token] for token in ids]
    for name, column in {"rollout_logprobs": chunk.rollout_logprobs, **columns}.items():
        values = column[sample.row].tolist()
        if len(values) == len(chunk.rollout_logprobs[sample.row]):  # a sample may be in no optimizer step
            tokens[name] = [float(f"{value:.6g}") for value in values]
    if sample.given_tokens and chunk.loss_mask is not None:
        mask: list[bool] = chunk.loss_mask[sample.row].tolist()
        for name in tokens.keys() - {"text"}:
            values = iter(tokens[name])
            tokens[name] = [next(values) if sampled else None for sampled in mask]
        tokens["loss_mask"] = list(map(int, mask))
    return tokens


def _of_some_prompts(prompt_ids: Sequence[str], count: int) -> Iterator[int]:
    """Yields the indices of the samples of so many prompts that there are at least `count`, or all of them."""
    groups = [[index for index, _ in group] for _, group in itertools.groupby(enumerate(prompt_ids), lambda it: it[1])]
    shown = min(len(groups), math.ceil(count * len(groups) / len(prompt_ids)))
    by_hash = sorted(range(len(groups)), key=lambda group: stable_hash(prompt_ids[groups[group][0]]))
    same = by_hash[: (shown + 1) // 2]
    others = sorted(by_hash[(shown + 1) // 2 :])
    spread = [others[i * len(others) // (shown // 2)] for i in range(shown // 2)]
    for group in sorted([*same, *spread]):
        yield from groups[group]


@dataclass(frozen=True, kw_only=True)
class PromptScores:
    """The scores of the responses to a held-out prompt, unweighted, by reward; NaN without a score."""

    prompt_id: str
    scores: Mapping[str, Sequence[float]]


def prompt_scores(
    samples: Sequence[SampleInfo], by_reward: Mapping[str, npt.NDArray[np.float32]]
) -> list[PromptScores]:
    """Returns the scores of each prompt, in the order of the samples; `by_reward` are [N] each."""
    rows: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        rows.setdefault(sample.prompt_id, []).append(index)
    return [
        PromptScores(prompt_id=prompt, scores={name: values[own].tolist() for name, values in by_reward.items()})
        for prompt, own in rows.items()
    ]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The metrics of a step and some of its samples.

    Args:
        step: from 1.
        metrics: without those of the optimizer steps.
        updates: metrics of each optimizer step.
        failures: of calls of reward functions, with tracebacks.
    """

    step: int
    metrics: Metrics
    updates: Sequence[Metrics]
    samples: Sequence[ShownSample] = ()
    failures: Sequence[str] = ()

    def all_metrics(self) -> dict[str, float]:
        """Returns all metrics; of those of optimizer steps the mean, of `*_max` and `*_min` the extreme."""
        names = dict.fromkeys(name for update in self.updates for name in update)
        values = {name: [update[name] for update in self.updates if name in update] for name in names}
        return {**self.metrics, **{name: _over_updates(name, found) for name, found in values.items()}}


def _over_updates(name: str, values: Sequence[float]) -> float:
    if name.endswith("_max"):
        return max(values)
    return min(values) if name.endswith("_min") else sum(values) / len(values)


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The metrics of an evaluation, the scores of its prompts, and some of its samples.

    Args:
        step: after which it was made; 0 before the first.
        metrics: `eval/*`, those of samples with the half width of their 95% interval, `eval/*_ci95`.
    """

    step: int
    metrics: Metrics
    samples: Sequence[ShownSample] = ()
    prompts: Sequence[PromptScores] = ()
