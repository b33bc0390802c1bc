"""Results of a step and of an evaluation, and the samples in them for people to read."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from megarl.data.branches import Branches
from megarl.data.stream import stable_hash
from megarl.data.tokenizer import Tokenizer
from megarl.groups.rollouts import Rollouts
from megarl.run.sinks import Metrics
from megarl.types import ConversationOutcome, FloatArray, Prompt, Ragged, RolloutChunk, SampleInfo


@dataclass(frozen=True, kw_only=True)
class ShownTurn:
    """What the model wrote in a turn of a conversation, or what was given between two turns.

    Args:
        text: text with special tokens, or token ids if the run has no tokenizer.
        reward: the environment's reward of a turn; None for given text.
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
        fields: other columns of the prompt's row.
        prompt_tokens, response_tokens: numbers of tokens; given tokens are in the
            response, and not counted.
        versions: versions of the weights that generated the response, in order.
        finished: False if the response was cut off at the length limit.
        score: training score; in an evaluation the reward model's, or else that of
            the first function.
        scores: unweighted scores by reward.
        advantage: advantage of the response; None where tokens have advantages, and
            in an evaluation.
        tokens: columns of the response tokens: `text`, if there is a tokenizer, and values; None if
            not kept. With given tokens also `loss_mask`, 1 where a token was sampled; the values of
            the others are None.
        turns: turns of a conversation, in order.
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
    scores: FloatArray,
    by_reward: Mapping[str, FloatArray],
    tokenizer: Tokenizer | None,
    count: int | Literal["all"],
    advantages: FloatArray | None = None,
    columns: TokenColumns | None = None,
) -> list[ShownSample]:
    """Returns about `count` samples, all those of some prompts, fetching only their chunks.

    Half of the prompts are the same whenever a step has them, the others are spread over the step.

    Args:
        scores: [C], by conversation.
        by_reward: [C] each.
        advantages: [N].
        columns: columns beside the engines' log-probabilities; None does not keep values of tokens.
    """
    texts = _Texts(tokenizer)
    conversations = Branches.of(rollouts.samples).conversation
    max_samples = len(rollouts.samples) if count == "all" else count
    shown: list[ShownSample] = []
    for index in _some_prompts([sample.prompt_id for sample in rollouts.samples], max_samples):
        sample = rollouts.samples[index]
        conversation = conversations[index]
        chunk = rollouts.chunks[sample.chunk]
        prompt_ids = chunk.prompt_ids[sample.row].tolist()
        response_ids = chunk.response_ids[sample.row].tolist()
        tokens: Mapping[str, Sequence[str | float | None]] | None = None
        if columns is not None:
            tokens = _token_columns(chunk, sample, columns(sample.chunk), texts)
        shown.append(
            ShownSample(
                sample_id=sample.sample_id,
                prompt_id=sample.prompt_id,
                prompt=texts.decode(prompt_ids),
                response=texts.decode(response_ids),
                text=None if tokenizer is None else tokenizer.decode(prompt_ids + response_ids, special=True),
                fields=json.loads(json.dumps(dict(prompts[sample.prompt_id].fields), default=str)),
                prompt_tokens=sample.prompt_tokens,
                response_tokens=sample.response_tokens,
                versions=tuple(dict.fromkeys(span.version for span in chunk.versions[sample.row])),
                finished=sample.finished,
                score=float(scores[conversation]),
                scores={name: float(values[conversation]) for name, values in by_reward.items()},
                advantage=None if advantages is None else float(advantages[index]),
                tokens=tokens,
                turns=None if sample.outcome is None else _turns(chunk, sample, texts),
                outcome=sample.outcome,
            )
        )
    return shown


class _Texts:
    """Texts of tokens; the ids themselves without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}

    def decode(self, ids: list[int]) -> str | tuple[int, ...]:
        if self._tokenizer is None:
            return tuple(ids)
        return self._tokenizer.decode(ids)

    def after(self, before: list[int], ids: list[int]) -> str | tuple[int, ...]:
        """Decodes ids as they read after others: some tokenizers drop the space before a first token."""
        if self._tokenizer is None:
            return tuple(ids)
        text = self._tokenizer.decode([*before, *ids], special=True)
        return text[len(self._tokenizer.decode(before, special=True)) :]

    def pieces(self, before: list[int], ids: list[int]) -> list[str] | None:
        """Returns the text of each token; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        for token in set(ids) - self._pieces.keys():
            self._pieces[token] = str(self.after(before, [token]))
        return [self._pieces[token] for token in ids]


def _turns(chunk: RolloutChunk, sample: SampleInfo, texts: _Texts) -> list[ShownTurn]:
    """Returns the turns of a conversation's branch, and what was given between them."""
    assert chunk.loss_mask is not None
    assert chunk.turns is not None
    assert chunk.turn_rewards is not None
    prompt_ids = chunk.prompt_ids[sample.row].tolist()
    ids = chunk.response_ids[sample.row].tolist()
    sampled = np.flatnonzero(chunk.loss_mask[sample.row]).tolist()
    turns: list[ShownTurn] = []
    shown = 0  # ids of the response that are in a turn
    first = 0  # sampled tokens before the turn
    for end, reward in zip(chunk.turns[sample.row].tolist(), chunk.turn_rewards[sample.row].tolist(), strict=True):
        start = sampled[first] if end > first else shown
        stop = sampled[end - 1] + 1 if end > first else shown
        if start > shown:
            given = texts.after((prompt_ids + ids[:shown])[-1:], ids[shown:start])
            turns.append(ShownTurn(sampled=False, text=given, tokens=start - shown))
        text = texts.after((prompt_ids + ids[:start])[-1:], ids[start:stop])
        turns.append(ShownTurn(sampled=True, text=text, tokens=stop - start, reward=float(f"{reward:.6g}")))
        shown = stop
        first = end
    return turns


def _token_columns(
    chunk: RolloutChunk, sample: SampleInfo, columns: Mapping[str, Ragged], texts: _Texts
) -> dict[str, Sequence[str | float | None]]:
    """Returns the values of a response's tokens, with six digits."""
    ids = chunk.response_ids[sample.row].tolist()
    mask = [True] * len(ids)
    if chunk.loss_mask is not None:
        mask = chunk.loss_mask[sample.row].tolist()
    tokens: dict[str, Sequence[str | float | None]] = {}
    pieces = texts.pieces(chunk.prompt_ids[sample.row].tolist()[-1:], ids)
    if pieces is not None:
        tokens["text"] = pieces
    for name, column in {"rollout_logprobs": chunk.rollout_logprobs, **columns}.items():
        values = column[sample.row].tolist()
        if len(values) == sum(mask):  # a sample may be in no optimizer step
            remaining = iter(values)
            tokens[name] = [float(f"{next(remaining):.6g}") if sampled else None for sampled in mask]
    if not all(mask):
        tokens["loss_mask"] = list(map(int, mask))
    return tokens


def _some_prompts(prompt_ids: Sequence[str], count: int) -> Iterator[int]:
    """Yields the indices of at least `count` samples, all those of some prompts; of all samples if there are fewer."""
    groups = [list(group) for _, group in itertools.groupby(range(len(prompt_ids)), lambda index: prompt_ids[index])]
    shown = min(len(groups), math.ceil(count * len(groups) / len(prompt_ids)))
    by_hash = sorted(range(len(groups)), key=lambda group: stable_hash(prompt_ids[groups[group][0]]))
    chosen = by_hash[: (shown + 1) // 2]
    others = sorted(by_hash[len(chosen) :])
    for i in range(shown // 2):
        chosen.append(others[i * len(others) // (shown // 2)])
    for group in sorted(chosen):
        yield from groups[group]


PromptScores = Mapping[str, Mapping[str, Sequence[float]]]
"""The scores of responses, unweighted, by held-out prompt and reward; NaN without a score."""


def prompt_scores(samples: Sequence[SampleInfo], by_reward: Mapping[str, FloatArray]) -> PromptScores:
    """Returns the scores of each prompt, in the order of the samples; `by_reward` are [N] each."""
    by_prompt: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        by_prompt.setdefault(sample.prompt_id, []).append(index)
    found: dict[str, dict[str, list[float]]] = {}
    for prompt, rows in by_prompt.items():
        found[prompt] = {name: values[rows].tolist() for name, values in by_reward.items()}
    return found


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The metrics of a step and some of its samples.

    Args:
        metrics: metrics of the step as a whole.
        updates: metrics of each optimizer step.
        failures: failed calls of reward functions, with tracebacks.
    """

    step: int
    metrics: Metrics
    updates: Sequence[Metrics]
    samples: Sequence[ShownSample] = ()
    failures: Sequence[str] = ()

    def all_metrics(self) -> dict[str, float]:
        """Returns all metrics: the mean over optimizer steps, the extreme for `*_max` and `*_min`."""
        values: dict[str, list[float]] = {}
        for update in self.updates:
            for name, value in update.items():
                values.setdefault(name, []).append(value)
        metrics = dict(self.metrics)
        for name, found in values.items():
            if name.endswith("_max"):
                metrics[name] = max(found)
            elif name.endswith("_min"):
                metrics[name] = min(found)
            else:
                metrics[name] = sum(found) / len(found)
        return metrics


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The metrics of an evaluation, the scores of its prompts, and some of its samples.

    Args:
        step: step after which it was made; 0 before the first.
        metrics: `eval/*`, those of samples with the half width of their 95% interval,
            `eval/*_ci95`.
    """

    step: int
    metrics: Metrics
    samples: Sequence[ShownSample] = ()
    prompts: PromptScores = field(default_factory=dict)
