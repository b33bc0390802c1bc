"""The sources of scores, and the evaluation of held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from megarl.bounds import Count, Natural, Positive, Seed, Temperature
from megarl.config.schema.base import Devices, Section
from megarl.config.schema.cluster_sections import Rollout
from megarl.config.schema.inputs import RowSettings, Source
from megarl.config.schema.questions import PatternWithGroup, Template


class RewardFunction(Section):
    """A function that scores responses; see docs/rewards.md."""

    name: str
    """A built-in function, or package.module:function of your own."""
    weight: float = 1.0
    """Factor of its score in the sum; evaluations report each function by itself, without it."""
    args: Mapping[str, Any] = {}
    """Keyword arguments for the function."""
    adapter: Literal["trl", "verl"] | None = None
    """Whose signature the function has: TRL's or verl's; null: MegaRL's own."""
    per: Literal["response", "batch", "group"] | None = None
    """What a call scores: a response, all responses that its process has of a step (batch), or all
    responses to a prompt (group). null: a response; a batch with adapter trl."""
    concurrency: Count | None = None
    """Calls in progress at once in each process, in threads unless the function is async; null: 32
    if it is async, else 1."""
    cache: bool = False
    """Call the function once per prompt and response in each process; repeated ones get the same
    score."""

    @property
    def unit(self) -> Literal["response", "batch", "group"]:
        """What a call scores, with null looked up."""
        if self.per is not None:
            return self.per
        return "batch" if self.adapter == "trl" else "response"


class JudgeModel(Section):
    """A model on engines of the run that scores each response; see docs/rewards.md."""

    path: str
    """Hugging Face directory of the model; with a chat template, the question is a user message."""
    devices: Devices
    """Devices of the engines, such as 6-7; no group and no other engine has them."""
    tp: Count = 1
    """Tensor parallel size of each engine."""
    template: Template
    """The question, with {prompt}, {response} and columns of the row."""
    pattern: PatternWithGroup
    """Its group's last match in the answer is the score."""
    weight: float = 1.0
    """Factor of the score."""
    max_new_tokens: Count = 1024
    """Largest number of tokens of an answer; a longer one gives no score."""
    max_model_len: Count = 8192
    """Largest number of tokens of question and answer together."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Of the answers; 0 takes the likeliest tokens."""
    kv_cache_mib: Count = 4096
    """Memory of the key-value cache of each engine rank, MiB."""

    @property
    def rollout(self) -> Rollout:
        """The settings of the engines."""
        return Rollout(
            devices=self.devices,
            tp=self.tp,
            max_new_tokens=self.max_new_tokens,
            max_model_len=self.max_model_len,
            kv_cache_mib=self.kv_cache_mib,
        )


class Reward(Section):
    """The score of a response: the weighted sum of the reward model, a judge, and functions."""

    path: str | None = None
    """Hugging Face checkpoint with a score head; null, only with model.random: its body and a
    random head."""
    head_std: Positive = 0.02
    """Standard deviation of the random head's weights."""
    head_seed: Seed = 0
    """Seed of the random head's weights."""
    weight: float = 1.0
    """Factor of the reward model's score."""
    dense: Literal["scores", "differences"] | None = None
    """Reward every token with the reward model's score after it, or its change; null: the last."""
    functions: tuple[RewardFunction, ...] = Field(default=(), strict=False)
    """Functions that score the responses."""
    judge_model: JudgeModel | None = None
    """A model that judges the responses; null: none."""
    processes: Count = 1
    """Processes of the functions, which share the responses of a step."""
    time_limit: Positive = 60.0
    """How long a call of a function may take, seconds; after that its responses have no score."""
    retries: Natural = 1
    """How often a call that failed is repeated."""
    max_unscored_steps: Count | None = 3
    """Steps in a row without any scored response that end the run with an error; null: none do."""
    shuffle: bool = False
    """Give each sample the score of another one: a control run with nothing to learn."""


class EnvironmentSettings(Section):
    """The environment of multi-turn rollouts; see docs/environments.md."""

    name: str
    """A built-in environment, or package.module:Class of your own."""
    args: Mapping[str, Any] = {}
    """Keyword arguments for the class."""
    weight: float = 1.0
    """Factor of its reward in the score."""
    max_turns: Count = 16
    """Most turns of the model in a conversation."""
    processes: Count = 1
    """Processes of the environments, which share the conversations of a step."""
    concurrency: Count = 256
    """Conversations in progress at once in each process."""
    time_limit: Positive = 60.0
    """Limit of a call of reset, step or close, or of a gateway's harness between two turns,
    seconds; then the conversation begins anew."""
    retries: Natural = 1
    """How often a conversation that failed begins anew; then it has no score."""
    history: Literal["template", "sampled"] = "template"
    """How the model reads its earlier turns: as the chat template writes them, in a new branch
    where that differs, or as they were sampled. See docs/chat-templates.md."""


class Evaluation(Section):
    """Held-out prompts, answered and scored, and not trained on."""

    prompts: Source | None = None
    """Rows as of data.prompts."""
    tasks: Count | None = None
    """Number of tasks that the environment makes: rows with an index alone, after those of
    data.tasks. Exactly one of prompts and tasks is given."""
    samples_per_prompt: Count = 1
    """Responses to each prompt."""
    greedy: bool = False
    """Take the likeliest token instead of sampling."""
    temperature: Temperature | None = None
    """Divides the logits; null takes that of the rollouts."""
    pass_at: tuple[Count, ...] = Field(default=(), strict=False)
    """Values of k for pass@k: the fraction of prompts that at least one of k responses solves."""
    success_at: float = 1.0
    """Least score of a response that solves its prompt."""
    functions: tuple[RewardFunction, ...] = Field(default=(), strict=False)
    """Functions to report, each by itself, besides the reward model's score."""

    @property
    def source(self) -> str:
        """Where the prompts are from, in words."""
        if self.prompts is None:
            return "tasks of the environment"
        return self.prompts.path


class PeriodicEvaluation(Evaluation):
    """Held-out prompts, answered and scored during training, and not trained on."""

    every: Count | None = None
    """Steps between evaluations; null: before the first step and after the last."""
    blocking: bool = True
    """Evaluate between two steps; false evaluates during them, and needs rollout.max_staleness."""


class HeldOut(Evaluation, RowSettings):
    """Held-out prompts, answered and scored, and how their rows are read."""

    first_task: Natural | None = None
    """Index of the first task, such as data.tasks of the training; given with tasks."""
