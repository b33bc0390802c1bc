"""PPO: the algorithm, the rewards, and the configuration of a run."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import ConfigDict, Field

from megarl.config.schema.base import Count, Fraction, NotNegative, Positive, Section, Seed
from megarl.config.schema.data import PromptData, RewardFunction, Source
from megarl.config.schema.rollout import Resharding, Rollout
from megarl.config.schema.run import Actor, Optimizer, RunConfig
from megarl.types import RoleName


class KL(Section):
    """The penalty for moving away from the reference."""

    model_config = ConfigDict(validate_by_alias=True, serialize_by_alias=True)

    placement: Literal["reward", "loss"] = Field(default="reward", alias="in")
    """Where the penalty acts: reward subtracts it from the reward of each token, loss adds it to the policy loss."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Per token, nats: k1 log p(actor) - log p(reference), in rewards alone; k2 half its square; k3 positive."""
    coef: NotNegative = 0.0
    """Weight of the penalty, reward or loss per nat; 0 is none, and needs no reference."""
    target: Positive | None = None
    """Adapt coef so that the mean divergence of a response (its sum over tokens, nats) comes to this; null keeps it."""
    horizon: Positive = 10000.0
    """Samples over which an adaptive coef moves: a step of n samples changes it by 0.2 * n / horizon at most."""


class Algo(Section):
    """PPO: each of a step's mini_batches equal parts makes one optimizer step, ppo_epochs times over."""

    advantage: Literal["gae", "grpo"] = "gae"
    """Advantage estimator: gae is generalised advantage estimation, with a critic; grpo compares a prompt's samples."""
    gamma: Fraction = 1.0
    """Discount per token, of gae."""
    lam: Fraction = 0.95
    """Decay of gae per token; 1 is Monte Carlo, 0 one-step."""
    whiten_advantages: bool = True
    """Shift and scale the advantages of a step to mean 0 and variance 1 over its response tokens; grpo has its own."""
    policy_loss: Literal["clip"] = "clip"
    """Policy loss: the clipped surrogate."""
    clip: Positive = 0.2
    """Half width of the probability ratio's interval around 1."""
    value_clip: Positive | None = 0.2
    """Half width of the interval in which a value may move in one step; null does not clip."""
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus, loss per nat."""
    kl: KL = KL()
    """The penalty for moving away from the reference."""
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """How token losses make the loss: the mean over the response tokens of an optimizer step, or over its responses."""
    score_clip: Positive | None = None
    """Scores are clipped to plus and minus this; null does not clip."""
    missing_end_score: float | None = None
    """Score of a response that the length limit ended; null leaves its own."""
    ppo_epochs: Count = 1
    """Passes over a step's samples."""
    mini_batches: Count = 1
    """Optimizer steps in a pass; divides prompts_per_step * samples_per_prompt."""


class Critic(Section):
    """The value function's training."""

    optimizer: Optimizer
    """Optimizer of the critic."""
    path: str | None = None
    """Hugging Face checkpoint whose body the critic starts from, a reward model's for example; null is the model's."""
    head_std: NotNegative = 0.0
    """Standard deviation of the value head's initial weights; 0 starts with all values at 0."""
    head_seed: Seed = 0
    """Seed of the value head's initial weights."""


class Reward(Section):
    """What scores a response: the reward model where a group has the role reward, and rules; their weighted sum."""

    path: str | None = None
    """Directory of a Hugging Face checkpoint with a score head; null: the model's body with a random head."""
    head_std: Positive = 0.02
    """Standard deviation of the random head's weights."""
    head_seed: Seed = 0
    """Seed of the random head's weights."""
    weight: float = 1.0
    """What the reward model's score is multiplied with."""
    functions: tuple[RewardFunction, ...] = Field(default=(), strict=False)
    """Rules that score the responses, too or alone."""
    processes: Count = 1
    """Processes that share the responses of a step, where there are rules."""
    shuffle: bool = False
    """Give each sample of a step the score of another: a control, in which there is nothing to learn."""


class Evaluation(Section):
    """Held-out prompts, answered with the sampling of the rollouts and scored; nothing is learnt from them."""

    prompts: Source
    """Rows as of data.prompts."""
    samples_per_prompt: Count = 1
    """Answers to each prompt."""
    every: Count | None = None
    """Steps between evaluations; null: before the first step and after the last."""
    functions: tuple[RewardFunction, ...] = Field(default=(), strict=False)
    """Rules to report, each by itself; the reward model's score is reported where there is one."""


class PPOConfig(RunConfig):
    """A run of PPO, or of a relative of it."""

    trained: ClassVar[tuple[RoleName, ...]] = ("actor", "critic")

    stage: Literal["ppo"]  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen)
    """What the run does: PPO."""
    rollout: Rollout
    """Generation with vLLM."""
    data: PromptData
    """The prompts."""
    algo: Algo = Algo()
    """The algorithm."""
    actor: Actor
    """The policy's training."""
    critic: Critic | None = None
    """The value function's training, where the algorithm has a critic."""
    reward: Reward = Reward()
    """What scores a response."""
    evaluation: Evaluation | None = None
    """Held-out prompts."""
    resharding: Resharding = Resharding()
    """The transfer of weights into the engines."""

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of each trained role in the whole run: the length of the learning rate's schedule."""
        return self.run.steps * self.algo.ppo_epochs * self.algo.mini_batches
