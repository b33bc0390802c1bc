"""A naive PPO and its relatives on Hugging Face models: one sequence at a time, plain loops, nothing of
megarl.

The choices, in the order of the computation:
- A sample's score is what ``scores`` makes of it.
- Token reward: -kl_coef * KL of old and ref, and the score on the last token. With ``kl_in_loss`` the rewards have no
  such term, and the actor's loss has + kl_coef * KL of new and ref.
- With ``estimate`` the advantages are those of the token rewards. With ``compare`` they are the sample's outcome and
  the sum of the KL terms from the token on, or with ``cumulative`` off the token's own.
- ``normalise`` changes the advantages; the returns stay.
- ``weigh`` are factors of each token's policy loss, from old and rollout log-probabilities; no denominator changes.
- With ``mask_unfinished`` a sample that did not end adds nothing to the actor's loss, but to its denominators.
- Losses are weighted sums over the response tokens of a mini-batch, the weights by ``aggregate``. Actor: policy loss
  - entropy_coef * H. Text that is mixed in has its mean negative log-likelihood L per token: + coef * L (add), or
  (1 - coef) of the policy loss + coef * L (convex), or half of the first (deepspeed).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.oracle import advantages, aggregation, comparisons, kl, normalisation, policy, scores, values
from tests.oracle.adam import Adam, AdamSettings, averaged
from tests.oracle.models import Sample, token_logits, token_statistics, token_values

Numbers = Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the algorithm; None disables a feature."""

    actor: AdamSettings
    critic: AdamSettings | None = None
    temperature: float = 1.0
    shapes: Sequence[scores.Shape] = ()
    every_token_scored: bool = False
    mask_unfinished: bool = False
    kl_coef: float = 0.0
    kl_estimate: Callable[[Tensor, Tensor], Tensor] = kl.k1
    kl_in_loss: bool = False
    kl_of_distributions: Callable[[Tensor, Tensor, float], Tensor] | None = None
    kl_target: float | None = None
    kl_horizon: float = 10000.0
    cumulative: bool = True
    whiten_rewards: bool = False
    estimate: Callable[[Numbers, Numbers], advantages.Rows] | None = None
    compare: Callable[[Sequence[Sample], comparisons.Scores], list[float]] | None = None
    normalise: Callable[[normalisation.Rows, Sequence[int]], list[list[float]]] | None = None
    bypass: bool = False
    weigh: Sequence[Callable[[Numbers, Numbers], list[float]]] = ()
    policy: Callable[[Tensor, Tensor, Tensor], policy.Loss] = policy.ppo
    value: Callable[[Tensor, Tensor, Tensor], values.Loss] = values.mse
    aggregate: Callable[[int, Sequence[int]], float] = aggregation.token_mean
    entropy_coef: float = 0.0
    mixing: str = "add"
    mixing_coef: float = 0.0
    average_decay: float = 0.992


@dataclass(kw_only=True)
class Experience:
    """Of one sample: one number per sampled token; without a critic the last two are empty."""

    old_logprobs: list[float]
    ref_logprobs: list[float]
    advantages: list[float]
    weights: list[float]
    learnt: float = 1.0
    rewards: list[float] = field(default_factory=list)
    old_values: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)
    ref_logits: Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step: its loss, the gradient before clipping and its norm, and means over its tokens."""

    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """The data of one iteration.

    Args:
        samples: all of them.
        mini_batches: the sample ids of every optimizer step, in order, over all epochs.
        texts: what is mixed into every optimizer step, as samples whose responses count.
        critic_alone: do not train the actor.
    """

    samples: Sequence[Sample]
    mini_batches: Sequence[Sequence[str]]
    texts: Sequence[Sequence[Sample]] = ()
    critic_alone: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of all iterations; the models are trained copies of those given, ``average`` is of the actor's weights."""

    experience: dict[str, Experience]
    actor_steps: list[Step]
    critic_steps: list[Step]
    actor: nn.Module
    critic: nn.Module | None
    average: dict[str, Tensor]


def ppo_iteration(
    actor: nn.Module,
    reference: nn.Module,
    critic: nn.Module | None,
    samples: Sequence[Sample],
    mini_batches: Sequence[Sequence[str]],
    settings: Settings,
    *,
    texts: Sequence[Sequence[Sample]] = (),
) -> Outcome:
    """One iteration on given samples; see ``ppo_run``."""
    return ppo_run(
        actor, reference, critic, [Iteration(samples=samples, mini_batches=mini_batches, texts=texts)], settings
    )


def ppo_run(
    actor: nn.Module,
    reference: nn.Module,
    critic: nn.Module | None,
    iterations: Sequence[Iteration],
    settings: Settings,
) -> Outcome:
    """Iterations one after the other, with the samples that each had.

    Args:
        actor, reference: causal language models; see ``models.causal_lm``.
        critic: see ``models.headed_model``; None for algorithms without one.
        iterations: what each learns from.
        settings: of the algorithm.
    """
    actor, critic = copy.deepcopy(actor), copy.deepcopy(critic)
    actor_adam, critic_adam = Adam(actor, settings.actor), critic and Adam(critic, settings.critic)
    average = {name: p.detach().clone() for name, p in actor.named_parameters()}
    all_experience: dict[str, Experience] = {}
    actor_steps: list[Step] = []
    critic_steps: list[Step] = []
    for iteration in iterations:
        experience = build_experience(actor, reference, critic, iteration.samples, settings)
        by_id = {sample.sample_id: sample for sample in iteration.samples}
        for i, ids in enumerate(iteration.mini_batches):
            members = [(by_id[sample_id], experience[sample_id]) for sample_id in ids]
            if not iteration.critic_alone:
                text = iteration.texts[i] if iteration.texts else ()
                actor_steps.append(optimizer_step(actor, actor_adam, members, policy_terms, settings, text=text))
                average = averaged(average, actor, settings.average_decay)
            if critic is not None:
                critic_steps.append(optimizer_step(critic, critic_adam, members, value_terms, settings))
        all_experience |= experience
        settings = _with_adapted_penalty(settings, list(experience.values()))
    return Outcome(
        experience=all_experience,
        actor_steps=actor_steps,
        critic_steps=critic_steps,
        actor=actor,
        critic=critic,
        average=average,
    )


def _with_adapted_penalty(settings: Settings, experience: Sequence[Experience]) -> Settings:
    """The settings of the next iteration."""
    if settings.kl_target is None:
        return settings
    sums = [sum(own.old_logprobs) - sum(own.ref_logprobs) for own in experience]
    drift, count = sum(sums) / len(sums), len(sums)
    coef = kl.adapted(settings.kl_coef, drift, count, target=settings.kl_target, horizon=settings.kl_horizon)
    return replace(settings, kl_coef=coef)


# ---- experience


@torch.no_grad()
def build_experience(
    actor: nn.Module, reference: nn.Module, critic: nn.Module | None, samples: Sequence[Sample], settings: Settings
) -> dict[str, Experience]:
    """What is computed once per iteration, by sample id."""
    rows = [_measured(actor, reference, critic, sample, settings) for sample in samples]
    shaped = [scores.shaped(sample, settings.shapes) for sample in samples]
    penalties = [_penalties(own, settings) for own in rows]
    if settings.estimate is not None:
        _estimate(rows, shaped, penalties, settings)
    else:
        assert settings.compare is not None
        outcomes = settings.compare(samples, shaped)
        for own, outcome, penalty in zip(rows, outcomes, penalties, strict=True):
            own.advantages = comparisons.reward_to_go_of(outcome, penalty, cumulative=settings.cumulative)
    if settings.normalise is not None:
        new = settings.normalise([own.advantages for own in rows], [sample.group for sample in samples])
        for own, numbers in zip(rows, new, strict=True):
            own.advantages = numbers
    return {sample.sample_id: own for sample, own in zip(samples, rows, strict=True)}


def _measured(actor: nn.Module, reference: nn.Module, critic: Any, sample: Sample, settings: Settings) -> Experience:
    """The models' outputs for a sample, and the correction weights of its tokens."""
    recomputed = token_statistics(actor, sample, settings.temperature)[0].tolist()
    weights = [1.0] * len(recomputed)
    for weigh in settings.weigh:
        weights = [a * b for a, b in zip(weights, weigh(recomputed, sample.rollout_logprobs), strict=True)]
    ref_logits = torch.empty(0)
    if settings.kl_of_distributions is not None:
        ref_logits = token_logits(reference, sample).detach()
    return Experience(
        old_logprobs=list(sample.rollout_logprobs) if settings.bypass else recomputed,
        ref_logprobs=token_statistics(reference, sample, settings.temperature)[0].tolist(),
        old_values=[] if critic is None else token_values(critic, sample).tolist(),
        advantages=[],
        weights=weights,
        learnt=0.0 if settings.mask_unfinished and not sample.finished else 1.0,
        ref_logits=ref_logits,
    )


def _penalties(own: Experience, settings: Settings) -> list[float]:
    coef = 0.0 if settings.kl_in_loss else settings.kl_coef
    return (-coef * settings.kl_estimate(torch.tensor(own.old_logprobs), torch.tensor(own.ref_logprobs))).tolist()


def _estimate(
    rows: Sequence[Experience], shaped: comparisons.Scores, penalties: Sequence[list[float]], settings: Settings
) -> None:
    """Advantages of token rewards, and returns where there are values."""
    assert settings.estimate is not None
    for own, score, penalty in zip(rows, shaped, penalties, strict=True):
        assert score is not None
        scored = range(len(penalty)) if settings.every_token_scored else [len(penalty) - 1]
        own.rewards = [p + (score if t in scored else 0.0) for t, p in enumerate(penalty)]
    if settings.whiten_rewards:
        whitened = normalisation.whiten([own.rewards for own in rows], keep_mean=True)
        for own, numbers in zip(rows, whitened, strict=True):
            own.rewards = numbers
    for own in rows:
        own.advantages, own.returns = settings.estimate(own.rewards, own.old_values)


# ---- update


def optimizer_step(
    model: nn.Module,
    adam: Adam,
    members: Sequence[tuple[Sample, Experience]],
    terms: Any,
    settings: Settings,
    *,
    text: Sequence[Sample] = (),
) -> Step:
    """The weighted sum of a loss over a mini-batch, its gradient, and the step."""
    lengths = [len(sample.sampled) for sample, _ in members]
    own_share, text_share = _shares(settings) if text else (1.0, 0.0)
    model.zero_grad()
    loss = 0.0
    metrics: dict[str, float] = {}
    for sample, experience in members:
        per_token, measured = terms(model, sample, experience, settings)
        share = per_token.sum() * settings.aggregate(len(sample.sampled), lengths) * own_share
        share.backward()
        loss += share.item()
        for name, numbers in measured.items():
            metrics[name] = metrics.get(name, 0.0) + numbers.double().sum().item() / sum(lengths)
    for sample in text:
        likelihood = token_statistics(model, sample, 1.0)[0].sum() / sum(len(s.response_ids) for s in text)
        (-text_share * likelihood).backward()
        loss -= text_share * likelihood.item()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Step(loss=loss, grad_norm=adam.step(), gradients=gradients, metrics=metrics)


def _shares(settings: Settings) -> tuple[float, float]:
    """Factors of the policy loss and of the text's loss in their sum."""
    coef = settings.mixing_coef
    return {"add": (1.0, coef), "convex": (1 - coef, coef), "deepspeed": (0.5, coef / 2)}[settings.mixing]


def policy_terms(
    actor: nn.Module, sample: Sample, experience: Experience, settings: Settings
) -> tuple[Tensor, dict[str, Tensor]]:
    """[R]: the actor's loss per token, and its metrics."""
    new, entropy = token_statistics(actor, sample, settings.temperature)
    old, weights = new.new_tensor(experience.old_logprobs), new.new_tensor(experience.weights)
    loss, clipped = settings.policy(new, old, new.new_tensor(experience.advantages))
    loss = weights * loss - settings.entropy_coef * entropy
    penalty: dict[str, Tensor] = {}
    if settings.kl_in_loss:
        estimate = settings.kl_estimate(new, new.new_tensor(experience.ref_logprobs))
        if settings.kl_of_distributions is not None:
            logits = token_logits(actor, sample), experience.ref_logits
            estimate = settings.kl_of_distributions(*logits, settings.temperature)
        loss = loss + settings.kl_coef * estimate
        penalty["kl"] = estimate.detach()
    learnt = [experience.learnt] * len(sample.sampled)
    if sample.kept is not None:
        learnt = [one if ids else 0.0 for one, ids in zip(learnt, sample.kept, strict=True)]
    return new.new_tensor(learnt) * loss, {
        **penalty,
        "ratio": torch.exp(new - old).detach(),
        "clipfrac": clipped,
        "approxkl": (new - old).detach() ** 2 / 2,
        "ppo_kl": (old - new).detach(),
        "entropy": entropy.detach(),
    }


def value_terms(
    critic: nn.Module, sample: Sample, experience: Experience, settings: Settings
) -> tuple[Tensor, dict[str, Tensor]]:
    """[R]: the critic's loss per token, and its metrics."""
    now = token_values(critic, sample)
    old, returns = now.new_tensor(experience.old_values), now.new_tensor(experience.returns)
    loss, clipped = settings.value(now, old, returns)
    return loss, {
        "vpred": now.detach(),
        "error": (now - returns).detach() ** 2,
        "clipfrac": clipped,
    }
