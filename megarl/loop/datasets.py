"""The data of each stage, read before anything starts; what is wrong with it becomes problems of the configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from megarl.config import PPOConfig, Problem, RewardModelConfig, SFTConfig
from megarl.config.schema import SourceFields
from megarl.data.demonstrations import Demonstration, load_demonstrations
from megarl.data.pairs import Pair, load_pairs
from megarl.data.prompts import load_prompts, random_prompts
from megarl.data.tokenizer import Tokenizer
from megarl.types import Prompt

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PromptSets:
    """What PPO reads.

    Args:
        train: prompts to learn from.
        held_out: prompts of the evaluations; empty without any.
        tokenizer: None where the rows have token ids.
        dropped: rows that were too long and left out.
    """

    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    tokenizer: Tokenizer | None
    dropped: int


@dataclass(frozen=True, kw_only=True)
class TextSets:
    """What supervised fine-tuning reads; see PromptSets. ``held_out`` is None where nothing is evaluated."""

    train: Sequence[Demonstration]
    held_out: Sequence[Demonstration] | None
    tokenizer: Tokenizer | None
    dropped: int


@dataclass(frozen=True, kw_only=True)
class PairSets:
    """What a reward model's training reads; see TextSets. ``reference`` are the prompts of the reference samples."""

    train: Sequence[Pair]
    held_out: Sequence[Pair] | None
    reference: Sequence[Prompt]
    tokenizer: Tokenizer | None
    dropped: int


class DataReader:
    """Reads sources with one tokenizer, and collects what is wrong with them.

    Args:
        tokenizer: of the run.
        vocab_size: ids must lie below it.
        chat_template: text prompts are what a user says in a chat.
        too_long: whether rows that are too long are an error, or left out.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, *, chat_template: bool, too_long: Literal["refuse", "drop"]
    ) -> None:
        self.tokenizer, self.dropped = tokenizer, 0
        self.problems: list[Problem] = []
        self._options: dict[str, Any] = {
            "vocab_size": vocab_size,
            "chat_template": chat_template,
            "too_long": too_long,
        }

    def prompts(self, field: str, source: SourceFields, max_tokens: int, *, at_least: int = 1) -> list[Prompt]:
        """Prompts of at most ``max_tokens``, and at least so many of them."""
        return self._read(load_prompts, field, source, max_tokens, at_least)

    def demonstrations(self, field: str, source: SourceFields, max_tokens: int) -> list[Demonstration]:
        """Demonstrations of at most ``max_tokens``."""
        return self._read(load_demonstrations, field, source, max_tokens, 1)

    def pairs(self, field: str, source: SourceFields, max_tokens: int) -> list[Pair]:
        """Pairs of at most ``max_tokens`` with either response."""
        return self._read(load_pairs, field, source, max_tokens, 1)

    def _read(
        self,
        load: Callable[..., tuple[list[T], int]],
        field: str,
        source: SourceFields,
        max_tokens: int,
        at_least: int,
    ) -> list[T]:
        """The rows; none where something is wrong."""
        try:
            rows, dropped = load(source, self.tokenizer, max_tokens=max_tokens, **self._options)
        except (OSError, ValueError) as error:
            fix = "correct the path or the rows (docs/data.md); of rows that are too long, see data.too_long"
            self.problems.append(Problem(field=field, value=source.path, rule=str(error), fix=fix))
            return []
        self.dropped += dropped
        if len(rows) < at_least:
            left = f", {dropped} of them too long" if dropped else ""
            rule = f"has {at_least} rows or more ({len(rows)} are usable{left})"
            fix = "add rows, or ask for fewer"
            self.problems.append(Problem(field=field, value=source.path, rule=rule, fix=fix))
        return rows


def read_prompt_sets(config: PPOConfig, reader: DataReader, vocab_size: int) -> PromptSets:
    """The prompts of a run of PPO."""
    data, made = config.data, config.data.random
    room = config.rollout.max_model_len - config.rollout.max_new_tokens
    train: list[Prompt] = []
    if data.prompts is not None:
        train = reader.prompts("data.prompts", data.prompts, room, at_least=data.prompts_per_step)
    elif made is not None and made.min_tokens <= made.max_tokens:
        train = random_prompts(
            count=made.count,
            min_tokens=made.min_tokens,
            max_tokens=made.max_tokens,
            vocab_size=vocab_size,
            seed=made.seed,
        )
    held_out: list[Prompt] = []
    if config.evaluation is not None:
        held_out = reader.prompts("evaluation.prompts", config.evaluation.prompts, room)
    return PromptSets(train=train, held_out=held_out, tokenizer=reader.tokenizer, dropped=reader.dropped)


def read_text_sets(config: SFTConfig, reader: DataReader) -> TextSets:
    """The demonstrations of a run of supervised fine-tuning."""
    data = config.data
    train = reader.demonstrations("data.train", data.train, data.max_tokens)
    held_out = None
    if data.evaluation is not None:
        held_out = reader.demonstrations("data.evaluation", data.evaluation, data.max_tokens)
    return TextSets(train=train, held_out=held_out, tokenizer=reader.tokenizer, dropped=reader.dropped)


def read_pair_sets(config: RewardModelConfig, reader: DataReader) -> PairSets:
    """The pairs of a reward model's training."""
    data, rollout, normalisation = config.data, config.rollout, config.normalisation
    train = reader.pairs("data.train", data.train, data.max_tokens)
    held_out = None
    if data.evaluation is not None:
        held_out = reader.pairs("data.evaluation", data.evaluation, data.max_tokens)
    reference: list[Prompt] = []
    if normalisation is not None and rollout is not None:
        room = rollout.max_model_len - rollout.max_new_tokens
        field, needed = "normalisation.prompts", normalisation.samples
        reference = reader.prompts(field, normalisation.prompts, room, at_least=needed)
    return PairSets(
        train=train, held_out=held_out, reference=reference, tokenizer=reader.tokenizer, dropped=reader.dropped
    )
