"""The sources of scores, and the evaluation of held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from megarl.bounds import Count, Natural, Positive, Seed
from megarl.config.schema.base import Section
from megarl.config.schema.inputs import Fault, Source, dropped


class RewardFunction(Section):
    """A rule that scores a response; see docs/rewards.md."""

    name: str
    """A built-in rule, or package.module:function of your own."""
    weight: float = 1.0
    """What its score is multiplied with in the sum; evaluations report each function by itself, without one."""
    args: Mapping[str, Any] = {}
    """Keyword arguments for the function."""


class Reward(Section):
    """What scores a response: the reward model where a group has the role reward, and rules; their weighted sum."""

    path: str | None = None
    """Directory of a Hugging Face checkpoint with a score head; null, with model.random alone: its body with a random
    head."""
    head_std: Positive = 0.02
    """Standard deviation of the random head's weights."""
    head_seed: Seed = 0
    """Seed of the random head's weights."""
    weight: float = 1.0
    """What the reward model's score is multiplied with."""
    dense: Literal["scores", "differences"] | None = None
    """Reward every token with the reward model's score after it, or with what it added; null: the response's end."""
    functions: tuple[RewardFunction, ...] = Field(default=(), strict=False)
    """Rules that score the responses, too or alone."""
    processes: Count = 1
    """Processes that share the responses of a step, where there are rules."""
    time_limit: Positive = 60.0
    """How long a rule may take for a response, seconds; the response has no score then."""
    retries: Natural = 1
    """How often a rule that failed on a response is asked again."""
    shuffle: bool = False
    """Give each sample of a step the score of another: a control, in which there is nothing to learn."""


class Evaluation(Section):
    """Held-out prompts, answered and scored; nothing is learnt from them."""

    prompts: Source
    """Rows as of data.prompts."""
    samples_per_prompt: Count = 1
    """Answers to each prompt."""
    greedy: bool = False
    """Take the likeliest token each time instead of sampling."""
    temperature: Positive | None = None
    """Divides the logits; null is that of the rollouts."""
    pass_at: tuple[Count, ...] = Field(default=(), strict=False)
    """Numbers of answers k for which to estimate the part of the prompts that one of k solves."""
    success_at: float = 1.0
    """Score from which on an answer counts as solving its prompt."""
    functions: tuple[RewardFunction, ...] = Field(default=(), strict=False)
    """Rules to report, each by itself; the reward model's score is reported where there is one."""


class PeriodicEvaluation(Evaluation):
    """Held-out prompts, answered and scored in training; nothing is learnt from them."""

    every: Count | None = None
    """Steps between evaluations; null: before the first step and after the last."""
    ema: bool = False
    """Evaluate the actor's moving average as well."""


class HeldOut(Evaluation):
    """Held-out prompts, answered and scored, and how their rows are read."""

    chat_template: bool = False
    """Text prompts are what a user says: put them into the tokenizer's chat template. Chats always are."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """What becomes of rows that leave no room for the response: an error, or left out and counted."""

    @property
    def drop(self) -> frozenset[Fault]:
        """Faults of the rows that are left out."""
        return dropped(too_long=self.too_long)
