"""The training of each role, and the output of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, StringConstraints

from megarl.algos import registry
from megarl.bounds import Count, Decay, Natural, NotNegative, Positive, Seed
from megarl.config.schema.base import Section, without_removed
from megarl.config.schema.choices import Choice, CustomFunction, OneOf
from megarl.config.schema.cluster_sections import Rollout
from megarl.config.schema.inputs import LossOn, Source

_TeacherName = Annotated[str, StringConstraints(pattern=r"^[\w-]+$")]
_CLOCK = re.compile(r"(?:(\d+):)?([0-5]?\d):([0-5]\d)")


def _seconds(value: object) -> object:
    """Returns the seconds of a text such as 0:30:00; YAML itself reads 4:00:00 as seconds."""
    if isinstance(value, str):
        match = _CLOCK.fullmatch(value)
        if match is not None:
            hours = int(match[1] or 0)
            return hours * 3600 + int(match[2]) * 60 + int(match[3])
    return value


DIRECT_LOSSES = OneOf(registry.DIRECT_LOSSES, CustomFunction, default="dpo")
PREFERENCE_LOSSES = OneOf(registry.PREFERENCE_LOSSES, CustomFunction, default="pairwise")


class Run(Section):
    """The run itself."""

    dir: str
    """Directory of the run's output."""
    seed: Seed = 0
    """Seed of the sampling and of the order of the data."""


class TrainingRun(Run):
    """The run itself."""

    dir: str
    """Directory of the run's output; training resumes from its last checkpoint, if there is one."""
    steps: Count | None = None
    """Steps of the run, each of rollouts and their updates, or of an optimizer step in sft, dpo
    and reward_model; null: by epochs."""
    epochs: Positive | None = None
    """Passes over the usable rows, instead of steps: epochs * rows / rows of a step, rounded
    down."""
    max_skipped_steps: Count | None = 3
    """Skipped optimizer steps in a row, with a loss or gradient that is not finite, that end the
    run with an error; null: none do."""
    time_limit: Annotated[Positive, BeforeValidator(_seconds)] | None = None
    """Time of a start of the run, seconds or as 4:00:00: before a step that might exceed it, the
    run saves and ends with exit code 75. A Slurm job's limit holds as well."""
    grace_period: NotNegative = 15.0
    """Seconds after SIGTERM to finish the step, save, and end with exit code 75; 0: it ends at once
    without a checkpoint."""
    max_restarts: Natural | None = None
    """Restarts from the last checkpoint, with new processes, after a process, node or call is lost
    or hangs; null: 3 in a Slurm or Ray job, 0 elsewhere."""

    @property
    def length_field(self) -> str:
        """The field that determines the run's length."""
        return "run.steps" if self.epochs is None else "run.epochs"


class Profiling(Section):
    """Steps with torch's profiler, which takes time: traces for Perfetto, and longest kernels."""

    steps: Annotated[tuple[Count, ...], Field(min_length=1, strict=False)] | None = None
    """Steps that are profiled; null: step 2, after the warm-up, or 1 in a run of one step."""
    ranks: tuple[Natural, ...] = Field(default=(0,), strict=False)
    """Ranks that are profiled in each group."""
    engines: Annotated[tuple[Natural, ...], Field(strict=False)] | None = None
    """Engines that are profiled, of one device each; null: engine 0, or none with rollout.tp above
    1."""

    def profiled_steps(self, steps: int) -> tuple[int, ...]:
        """Returns the profiled steps of a run with this number of steps."""
        if self.steps is None:
            return (min(2, steps),)
        return self.steps

    def profiled_engines(self, rollout: Rollout | None) -> tuple[int, ...]:
        """Returns the profiled engines."""
        if self.engines is not None:
            return self.engines
        if rollout is not None and rollout.tp == 1:
            return (0,)
        return ()


LimitedMetric = Literal[
    "policy/approxkl",
    "policy/clipfrac",
    "policy/entropy",
    "objective/kl",
    "objective/kl_per_token",
    "rollout/logprob_gap",
    "response_length/mean",
    "truncated_fraction",
    "group/zero_std_fraction",
    "value/explained_variance",
]
CheckedMetric = (
    LimitedMetric
    | Literal[
        "objective/score",
        "rewards/unscored",
        "policy/grad_norm",
        "value/grad_norm",
        "sft/grad_norm",
        "dpo/grad_norm",
        "reward_model/grad_norm",
        "skipped",
        "not finite",
    ]
)


class Health(Section):
    """The checks of the run's own metrics (docs/metrics.md)."""

    limits: Mapping[LimitedMetric, float | None] = {}
    """Limits of healthy values by metric; null is none. objective/kl, rollout/logprob_gap and
    response_length/mean have one only here: three steps above it begin a finding."""
    stop: Annotated[tuple[CheckedMetric, ...], Field(strict=False)] = ()
    """Metrics whose findings end the run with an error, after a checkpoint, when they begin."""


class Optimizer(Section):
    """Adam with decoupled weight decay."""

    adam: Literal["pytorch", "tensorflow"] = "pytorch"
    """pytorch adds eps to the second moment's root after bias correction, tensorflow before."""
    lr: Positive
    """Highest learning rate."""
    schedule: Literal["constant", "linear", "cosine", "anneal"] = "constant"
    """Learning rate from the warm-up to the last optimizer step. anneal: linear from lr to 0 by
    steps, whose optimizer steps share a rate."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the run's optimizer steps in which the learning rate rises linearly from 0."""
    final_lr: NotNegative = 0.0
    """Learning rate at the end of a linear or cosine schedule."""
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.999)
    """Decays of the running means of the gradient and of its square."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay, per unit of learning rate."""
    clip_grad: Positive | None = 1.0
    """Largest global gradient norm; null does not clip."""


class LoRA(Section):
    """Low-rank adapters, which are trained in place of the weights (docs/lora.md)."""

    rank: Count
    """Rank of the adapters: rows of their matrices A, and columns of B."""
    alpha: Positive = 32.0
    """The product B A is multiplied by alpha / rank."""
    rslora: bool = False
    """Multiply it by alpha / sqrt(rank) instead."""
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1, strict=False)] = "all-linear"
    """Linear layers with adapters, by the last part of their names, such as [q_proj, v_proj];
    all-linear: all but the output layer and routers, those of experts too."""
    init: Literal["default", "gaussian"] = "default"
    """Initial A: default is uniform up to 1 / sqrt(inputs), gaussian normal with deviation 1 / rank. B
    starts with 0."""
    seed: Seed = 0
    """Seed of the initial A."""
    path: str | None = None
    """Directory of adapters in PEFT's format, of the same rank and targets, to start from; null: new ones."""
    merge: bool = True
    """Export the model with the adapters merged into its weights, too, besides the adapters themselves."""

    @property
    def scale(self) -> float:
        """Factor of the product B A."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


class Actor(Section):
    """The policy's training."""

    optimizer: Optimizer
    """Optimizer of the actor."""
    lora: LoRA | None = None
    """Train adapters of the actor in place of its weights; null trains the weights."""


class EMASettings(Section):
    """A moving average of the actor's weights, in float32, updated by every optimizer step."""

    decay: Decay = 0.992
    """Decay of the average per optimizer step."""


class Policy(Actor):
    """The policy's training."""

    ema: EMASettings | None = None
    """Keep a moving average of the actor's weights, and export it; null does not."""


class BestCheckpoint(Section):
    """Which checkpoint is the best."""

    metric: str
    """Metric of the evaluations, such as eval/loss, at the step of the checkpoint."""
    mode: Literal["max", "min"] = "max"
    """Whether higher or lower values are better."""


class CheckpointSettings(Section):
    """Checkpoints, from which a run resumes."""

    every: Count | None = None
    """Steps between checkpoints; the last step always has one. null: the last step alone."""
    async_save: bool = True
    """Write checkpoints during the training, from copies in host memory; the last one is written at
    once."""
    keep: Count = 2
    """Number of checkpoints to keep, the newest ones; others are removed."""
    keep_every: Count | None = None
    """Also keep every N-th step's checkpoint; null: none."""
    best: BestCheckpoint | None = None
    """Keep also the best one by an evaluation; null does not."""


class Tracking(Section):
    """Where the metrics go, besides metrics.jsonl and the console."""

    tensorboard: bool = True
    """Write TensorBoard events into the run's directory."""
    wandb_project: str | None = None
    """Project of Weights & Biases to log to, with the package wandb and a key unless WANDB_MODE is
    offline; null does not."""
    mlflow_experiment: str | None = None
    """Experiment of MLflow to log to; null does not. Needs the package mlflow, or mlflow-skinny."""
    trackio_project: str | None = None
    """Project of Trackio to log to; null does not. Needs the package trackio."""
    samples: Natural | Literal["all"] = 4
    """Samples of each step and evaluation in samples.jsonl, with texts and scores: this many,
    rounded up to whole prompts, or all."""
    samples_mib: Count = 1024
    """Limit of samples.jsonl, MiB; at it, every other step of the older half but the first goes."""
    tokens: bool = False
    """Write values per token of these samples, too: log-probabilities, advantages, weights, masks,
    ratio and clipping; some 70 bytes a token."""


class ValueNorm(Section):
    """Normalises the critic's targets to mean 0 and variance 1, by moving moments."""

    beta: Decay = 0.99995
    """Decay of the moments per step."""
    eps: Positive = 1e-5
    """Least denominator of the moments' bias correction."""


class Critic(Section):
    """The value function's training."""

    optimizer: Optimizer
    """Optimizer of the critic."""
    path: str | None = None
    """Hugging Face checkpoint of the critic's initial body; null takes the model's."""
    head: Literal["new", "loaded"] = "new"
    """The initial value head: a new one, or the score head of path."""
    head_std: NotNegative = 0.0
    """Standard deviation of a new head's initial weights; 0 starts with all values at 0."""
    head_seed: Seed = 0
    """Seed of a new head's initial weights."""
    warmup_steps: Natural = 0
    """Steps at the start of the run that train the critic alone."""
    value_norm: ValueNorm | None = None
    """Normalise the critic's targets; null does not."""
    lora: LoRA | None = None
    """Train adapters of the critic, and its head, in place of its weights; null trains all."""
    shares_base: bool = False
    """Use the actor's weights below the adapters of both, which then are in memory once."""


class PTX(Section):
    """Pretraining texts, in the actor's optimizer steps, in addition to the rollouts."""

    data: Source
    """Rows as in data.train of stage sft; data.too_long says what becomes of too long ones."""
    max_tokens: Count
    """Largest number of tokens of a row."""
    sequences_per_mini_batch: Count
    """Rows in each optimizer step; the data is repeated."""
    coef: NotNegative
    """Weight of the texts' loss, the mean negative log-likelihood per token."""
    mode: Literal["add", "convex", "deepspeed"] = "add"
    """The loss: policy + coef * texts; (1 - coef) * policy + coef * texts; or half of the first."""
    loss_on: LossOn = "all"
    """Tokens in the loss."""
    chat_template: bool = False
    """Put text prompts into the chat template, as a user message; chats always are."""


class RewardTraining(Section):
    """The reward model's training, from the model's body and a head of random weights."""

    optimizer: Optimizer
    """Optimizer of the reward model."""
    head_std: Literal["inverse_sqrt", "inverse"] = "inverse_sqrt"
    """Deviation of the head's initial weights: 1 / sqrt(hidden + 1), or 1 / (hidden + 1)."""
    head_seed: Seed = 0
    """Seed of the head's initial weights."""
    loss: Annotated[Choice, PREFERENCE_LOSSES] = PREFERENCE_LOSSES("pairwise")
    """The loss of preferences."""
    lora: LoRA | None = None
    """Train adapters of the reward model, and its head, in place of its weights; null trains all."""


class PreferenceTraining(Section):
    """What the policy learns from preferences."""

    loss: Annotated[Choice, DIRECT_LOSSES] = DIRECT_LOSSES("dpo")
    """The loss of pairs of responses, or of single ones (kto)."""

    @property
    def reads(self) -> frozenset[str]:
        """The inputs that the loss reads."""
        return registry.DIRECT_LOSSES.reads(self.loss.name)

    @property
    def reads_reference(self) -> bool:
        return not self.reads.isdisjoint(registry.INPUTS_OF_REFERENCES)

    @property
    def is_unpaired(self) -> bool:
        """Whether the loss is of single responses, each desirable or not."""
        return not self.reads.isdisjoint(registry.INPUTS_OF_RESPONSES)


class Reference(Section):
    """The model of the role reference, whose log-probabilities a penalty compares."""

    path: str | None = None
    """Hugging Face directory of a teacher, of any size, with the model's tokenizer; null takes the
    initial model."""
    teachers: Annotated[Mapping[_TeacherName, str], BeforeValidator(without_removed)] = {}
    """Several teachers in place of one: directories by name, such as {math: models/math}."""
    column: str | None = None
    """Column of the prompts' rows with the name of the teacher of each."""

    @property
    def directories(self) -> Mapping[str, str]:
        """The directory of each teacher by its field; none with the initial model."""
        fields = {f"reference.teachers.{name}": path for name, path in self.teachers.items()}
        if self.path is not None:
            fields["reference.path"] = self.path
        return fields


class DirectReference(Section):
    """The model from which training on preferences starts, whose log-probabilities a loss may read."""

    precompute: bool = False
    """Let the actor compute them before the first step, once for each row, and keep them in run.dir,
    in place of a pass of the role reference in each step."""


class Normalisation(Section):
    """Scales the trained scores by reference samples, drawn from the model before training."""

    prompts: Source
    """Rows with a prompt each."""
    samples: Count = 512
    """Prompts to answer, once each."""
    mean: float = 0.0
    """Mean of the scaled scores."""
    std: Positive = 1.0
    """Standard deviation of the scaled scores."""
    ddof: Literal[0, 1] = 0
    """Degrees of freedom in the measured variance: 0 divides by n samples, 1 by n - 1."""
    before: bool = False
    """Scale the head by the same samples before training, too."""
