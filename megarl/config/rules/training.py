"""The course of the learning rates, and the losses of reward models."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.problems import Problem
from megarl.config.rules.unused import unused
from megarl.config.schema import Actor, Critic, Optimizer, RewardTraining
from megarl.config.schema.reward_model import Pairwise


def actor_rate_falls(actor: Actor) -> Iterator[Problem]:
    """The actor's final learning rate means something."""
    yield from _rate_falls("actor.optimizer", actor.optimizer)


def critic_rate_falls(critic: Critic | None) -> Iterator[Problem]:
    """The critic's final learning rate means something."""
    if critic is not None:
        yield from _rate_falls("critic.optimizer", critic.optimizer)


def reward_rate_falls(reward: RewardTraining) -> Iterator[Problem]:
    """The reward model's final learning rate means something."""
    yield from _rate_falls("reward.optimizer", reward.optimizer)


def margins_are_read(reward: RewardTraining) -> Iterator[Problem]:
    """The plain exponential knows no margin."""
    if isinstance(reward.loss, Pairwise) and reward.loss.margin and reward.loss.kind == "logexp":
        rule, fix = "has no effect with reward.loss.kind = logexp", "remove it, or set kind to logsigmoid"
        yield Problem(field="reward.loss.margin", value="True", rule=rule, fix=fix)


def _rate_falls(field: str, optimizer: Optimizer) -> Iterator[Problem]:
    """A constant rate has no end of its own, nor has one that anneals; another one comes down to it."""
    final = optimizer.final_lr
    if optimizer.schedule == "anneal":
        names = ("warmup", "final_lr")
        yield from unused(field, optimizer, names, "with schedule anneal, from lr to 0", "or choose linear")
        return
    if optimizer.schedule == "constant" and final > 0:
        rule, fix = "has no effect with a constant schedule", "remove it, or choose linear or cosine"
    elif optimizer.schedule != "constant" and final >= optimizer.lr:
        rule, fix = f"below lr = {optimizer.lr:g}, from which a {optimizer.schedule} schedule comes down", "lower it"
    else:
        return
    yield Problem(field=f"{field}.final_lr", value=f"{final:g}", rule=rule, fix=fix)
