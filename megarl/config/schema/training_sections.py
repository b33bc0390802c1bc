"""The training of each role, the texts and samples beside it, and the output of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megarl.algos import registry
from megarl.bounds import Count, Decay, Natural, NotNegative, Positive, Seed
from megarl.config.schema.algo import SELECTIONS
from megarl.config.schema.base import Section
from megarl.config.schema.choices import Choice, CustomFunction, OneOf
from megarl.config.schema.inputs import LossOn, Source

PREFERENCE_LOSSES = OneOf(registry.PREFERENCE_LOSSES, CustomFunction, default="pairwise")


class Run(Section):
    """The run itself."""

    dir: str
    """Directory that the run writes."""
    seed: Seed = 0
    """Seed of sampling and of the order of the data."""


class TrainingRun(Run):
    """The run itself."""

    dir: str
    """Directory that the run writes; where it has a checkpoint already, training goes on from there."""
    steps: Count
    """Steps to take: a round of rollouts and its updates, of sft and reward_model an optimizer step."""


class Optimizer(Section):
    """Adam with decoupled weight decay."""

    adam: Literal["pytorch", "tensorflow"] = "pytorch"
    """Whether eps is added to the root of the second moment after its bias correction, or before."""
    lr: Positive
    """Learning rate, at its highest."""
    schedule: Literal["constant", "linear", "cosine", "anneal"] = "constant"
    """How the learning rate moves after the warm-up, until the run's last optimizer step. anneal is linear to 0 by the
    run's steps: the optimizer steps of one of them have one rate, the first step lr."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Part of the run's optimizer steps in which the learning rate rises linearly from 0."""
    final_lr: NotNegative = 0.0
    """Learning rate at the end of a linear or cosine schedule."""
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.95)
    """Decays of the running means of the gradient and of its square."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay, per unit of learning rate."""
    clip_grad: Positive | None = 1.0
    """Largest global gradient norm; null does not clip."""


class Actor(Section):
    """The policy's training."""

    optimizer: Optimizer
    """Optimizer of the actor."""


class EMASettings(Section):
    """An exponential moving average of the actor's weights, in float32, updated after every optimizer step."""

    decay: Decay = 0.992
    """What is kept of the average."""


class Policy(Actor):
    """The policy's training."""

    ema: EMASettings | None = None
    """Keep a moving average of the actor, export it too; null does not."""


class CheckpointSettings(Section):
    """What a run keeps to go on after an interruption."""

    every: Count | None = None
    """Steps between checkpoints; the last step makes one in any case. null: the last step alone."""
    keep: Count = 2
    """Checkpoints to keep; older ones are removed."""


class Tracking(Section):
    """Where the metrics go, besides metrics.jsonl and the console."""

    tensorboard: bool = True
    """Write TensorBoard events into the run's directory."""
    wandb_project: str | None = None
    """Project of Weights & Biases to log to; null does not. Needs the package wandb."""
    samples: Natural = 4
    """Samples of each step with rollouts and of each evaluation that samples.jsonl gets, with texts and scores."""


class ValueNorm(Section):
    """The critic learns returns of mean 0 and variance 1, by moving moments."""

    beta: Decay = 0.99995
    """Decay of the moments per step."""
    eps: Positive = 1e-5
    """Keeps the correction of the moments' start off 0."""


class Critic(Section):
    """The value function's training."""

    optimizer: Optimizer
    """Optimizer of the critic."""
    path: str | None = None
    """Hugging Face checkpoint whose body the critic starts from, a reward model's for example; null is the model's."""
    head: Literal["new", "loaded"] = "new"
    """The value head: a new one, or the score head of path."""
    head_std: NotNegative = 0.0
    """Standard deviation of a new head's initial weights; 0 starts with all values at 0."""
    head_seed: Seed = 0
    """Seed of a new head's initial weights."""
    warmup_steps: Natural = 0
    """First steps of the run in which the critic alone is trained."""
    value_norm: ValueNorm | None = None
    """Normalise what the critic learns; null does not."""


class PTX(Section):
    """Texts that the actor learns beside the rollouts, in the same optimizer steps."""

    data: Source
    """Rows as of data.train of stage sft."""
    max_tokens: Count
    """Tokens of a row, at most."""
    sequences_per_mini_batch: Count
    """Rows in each optimizer step; the data begins again when it is through."""
    coef: NotNegative
    """Weight of their loss, the mean negative log-likelihood per token."""
    mode: Literal["add", "convex", "deepspeed"] = "add"
    """The whole: policy + coef * texts; (1 - coef) * policy + coef * texts; half of the first."""
    loss_on: LossOn = "all"
    """Tokens that are learnt."""
    chat_template: bool = False
    """Text prompts are what a user says: put them into the tokenizer's chat template. Chats always are."""


class RAFTSettings(Section):
    """Which samples of a step are learnt, and how."""

    strategy: Annotated[Choice, SELECTIONS] = SELECTIONS("local")
    """Which samples are selected."""
    discard_unfinished: bool = False
    """Never select responses that the length limit ended."""
    min_score: float | None = None
    """Never select responses with a lower score; null selects any."""
    epochs: Count = 1
    """Passes over the selected samples."""
    mini_batches: Count = 1
    """Optimizer steps in a pass."""
    loss_on: LossOn = "response"
    """Tokens that are learnt."""


class RewardTraining(Section):
    """The reward model's training; its body starts as the model's, its head normally distributed around 0."""

    optimizer: Optimizer
    """Optimizer of the reward model."""
    head_std: Literal["inverse_sqrt", "inverse"] = "inverse_sqrt"
    """Standard deviation of the head's initial weights: 1 / sqrt(hidden + 1), or 1 / (hidden + 1)."""
    head_seed: Seed = 0
    """Seed of the head's initial weights."""
    loss: Annotated[Choice, PREFERENCE_LOSSES] = PREFERENCE_LOSSES("pairwise")
    """How the preferences are learnt."""


class Normalisation(Section):
    """Reference samples, drawn from the model as it was before: the trained scores have this mean and std there."""

    prompts: Source
    """Rows with a prompt each."""
    samples: Count = 512
    """Prompts to answer, once each."""
    mean: float = 0.0
    """Mean that the scores get."""
    std: Positive = 1.0
    """Standard deviation that the scores get."""
    ddof: Literal[0, 1] = 0
    """What is taken off the number of samples in the variance that is measured: 0 population, 1 sample."""
    before: bool = False
    """Scale the head by the same samples before the training, too."""
